"""The workload on one engine in this process: what the stack is measured against."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from bench.workload import Outcome, Timing, Workload, summarise
from decode_worker.policy import plan
from engine.core import Engine
from engine.loading import load
from engine.spec import EngineSpec
from protocol.request import Request, Sampling


def bare_engine(model: Path) -> Engine:
    """As a worker would load it, with one compute thread."""
    torch.set_num_threads(1)
    spec = EngineSpec(model_path=str(model), role="decode", threads=1)
    return load(spec, plan, lambda _what, _fraction: None).engine


def run_bare(engine: Engine, workload: Workload) -> Outcome:
    waiting = workload.prompts()
    sampling = Sampling(temperature=0.0, max_tokens=workload.output_tokens, ignore_eos=True)
    sent: dict[int, float] = {}
    timings: dict[int, Timing] = {}
    running = 0
    began = time.perf_counter()
    while waiting or running:
        while waiting and running < workload.streams:
            handle = len(sent) + 1
            prompt = tuple(waiting.pop())
            request = Request(
                id=str(handle), prompt=prompt, sampling=sampling, cache_root=bytes(16)
            )
            sent[handle], timings[handle] = time.perf_counter(), Timing()
            engine.generate(handle, request)
            running += 1
        for out in engine.run(engine.plan()):
            timings[out.handle].token(time.perf_counter() - sent[out.handle], 1)
            running -= out.finish != 0
    return summarise(list(timings.values()), time.perf_counter() - began)
