"""The contestants of `bench.engine`: child processes that take jobs as JSON lines on a pipe.

A contestant loads a model, then generates greedily whenever it is asked: all prompts of a job come
at once, with one compute thread. ``python -m bench.engine.contestants KIND [CORE]`` is the program
of one child.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
import torch

from bench.lib.settings import engine_settings
from engine.execution.loading import load_engine
from engine.scheduling.step_policy import plan_decode_step
from protocol.requests import Request
from protocol.sampling_params import SamplingParams

CONTESTANTS = {
    "engine": ("bench.engine.contestants", "EngineContestant"),
    "generate": ("bench.engine.peers", "GenerateContestant"),
    "generate_batch": ("bench.engine.peers", "GenerateBatchContestant"),
}
KINDS = tuple(CONTESTANTS)
ENGINE, *PEERS = KINDS


class ContestantJob(msgspec.Struct, frozen=True):
    """Either ``load``, a model folder to load, or prompts to run on the loaded model."""

    load: str = ""
    prompts: list[list[int]] = []
    new_tokens: int = 0


class ContestantRun(msgspec.Struct, frozen=True):
    """The result of one job. ``error`` says why it failed, and is empty otherwise."""

    wall_s: float = 0.0
    decode_rate: float = 0.0  # tokens per second while every sequence decodes
    tokens: list[list[int]] = []
    error: str = ""


class Contestant(Protocol):
    """An implementation of greedy generation that is compared with the others."""

    def load(self, folder: str) -> None: ...

    def run(self, prompts: list[list[int]], new_tokens: int) -> ContestantRun: ...


def steady_rate(stamps: Sequence[Sequence[float]]) -> float:
    """Return tokens per second between the last first token and the first last token.

    ``stamps`` holds the times of the tokens of each sequence, in seconds. The rate is 0.0 when the
    sequences never decode all together.
    """
    began = max(times[0] for times in stamps)
    ended = min(times[-1] for times in stamps)
    count = sum(began < at <= ended for times in stamps for at in times)
    return count / (ended - began) if ended > began else 0.0


class EngineContestant:
    """Baton's engine with exact KV and no bound on a step: all prompts first, then all decode."""

    def load(self, folder: str) -> None:
        spec = engine_settings(
            folder,
            threads=1,
            max_batch=32,
            kv_tokens=16384,
            kv_precision="exact",
            step_budget_ms=0.0,
        )
        self._engine = load_engine(spec, plan_decode_step, lambda _what, _fraction: None).engine
        self._handle = 0

    def run(self, prompts: list[list[int]], new_tokens: int) -> ContestantRun:
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        began = time.perf_counter()
        stamps: dict[int, list[float]] = {}
        tokens: dict[int, list[int]] = {}
        for prompt in prompts:
            self._handle += 1
            name, root = str(self._handle), self._handle.to_bytes(16, "little")  # shares no prefix
            request = Request(id=name, prompt=tuple(prompt), sampling=sampling, cache_root=root)
            self._engine.generate(self._handle, request)
            stamps[self._handle], tokens[self._handle] = [], []
        while step := self._engine.plan():
            for out in self._engine.run(step):
                stamps[out.handle].append(time.perf_counter())
                tokens[out.handle].append(out.token)
        wall = time.perf_counter() - began
        return ContestantRun(wall, steady_rate(list(stamps.values())), list(tokens.values()))


class ContestantProcess:
    """A contestant in a process of its own.

    It computes only between a call of ``ask`` and its return, so that several can take turns on one
    core. A contestant that fails once stays out, and ``error`` says why.
    """

    def __init__(self, kind: str, core: int | None) -> None:
        self.kind = kind
        self.error = ""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-m", "bench.engine.contestants", kind]
        self._process = subprocess.Popen(
            command if core is None else [*command, str(core)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, job: ContestantJob) -> ContestantRun:
        """Run one job and return its result; a failure is in the result's ``error``."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if self.error:
            return ContestantRun(error=self.error)
        line = b""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if line:
            run = msgspec.json.decode(line, type=ContestantRun)
        else:
            run = ContestantRun(error=self._last_line())
        self.error = run.error
        return run

    def _last_line(self) -> str:
        self._process.wait(timeout=30)  # the pipe may close before the last line is written
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"the process ended: {lines[-1] if lines else 'it wrote nothing'}"

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(timeout=30)
        self._log.close()


def make_contestant(kind: str) -> Contestant:
    """Import and create one contestant. Only the peers import transformers, which is large."""
    module, name = CONTESTANTS[kind]
    found: Contestant = getattr(importlib.import_module(module), name)()
    return found


def run_job(contestant: Contestant, job: ContestantJob) -> ContestantRun:
    """Load a model or run prompts, and report any exception as the result's ``error``."""
    try:
        if job.load:
            contestant.load(job.load)
            return ContestantRun()
        return contestant.run(job.prompts, job.new_tokens)
    except Exception as error:  # a peer may fail in any way
        return ContestantRun(error=f"{type(error).__name__}: {error}")


def main() -> None:
    kind, *core = sys.argv[1:]
    if core:
        os.sched_setaffinity(0, {int(core[0])})
    torch.set_num_threads(1)
    # The pipe carries answers only; other output goes to standard error.
    with os.fdopen(os.dup(1), "wb", buffering=0) as answers:
        os.dup2(2, 1)
        contestant = make_contestant(kind)
        for line in sys.stdin.buffer:
            run = run_job(contestant, msgspec.json.decode(line, type=ContestantJob))
            answers.write(msgspec.json.encode(run) + b"\n")


if __name__ == "__main__":
    main()
