"""The program of one contestant: ``python -m bench.contestant_main KIND [CORE]``."""

from __future__ import annotations

import importlib
import os
import sys

import msgspec
import torch

from bench.contestant import Contestant, Job, Run

CONTESTANTS = {
    "engine": ("bench.bare", "EngineContestant"),
    "generate": ("bench.peers", "GenerateContestant"),
    "generate_batch": ("bench.peers", "GenerateBatchContestant"),
}


def contestant_of(kind: str) -> Contestant:
    """Imports nothing of the other kinds: transformers must not weigh on the engine's process."""
    module, name = CONTESTANTS[kind]
    found: Contestant = getattr(importlib.import_module(module), name)()
    return found


def answer(contestant: Contestant, job: Job) -> Run:
    try:
        if job.load:
            contestant.load(job.load)
            return Run()
        return contestant.run(job.prompts, job.new_tokens)
    except Exception as error:  # a peer may fail in any way: it is reported, and out
        return Run(error=f"{type(error).__name__}: {error}")


def main() -> None:
    kind, *core = sys.argv[1:]
    if core:
        os.sched_setaffinity(0, {int(core[0])})
    torch.set_num_threads(1)
    # Answers have the pipe for themselves; what else is printed goes where errors go.
    with os.fdopen(os.dup(1), "wb", buffering=0) as answers:
        os.dup2(2, 1)
        contestant = contestant_of(kind)
        for line in sys.stdin.buffer:
            run = answer(contestant, msgspec.json.decode(line, type=Job))
            answers.write(msgspec.json.encode(run) + b"\n")


if __name__ == "__main__":
    main()
