"""One engine in this process: what the stack is measured against, and one of bench.engine's
contestants."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from bench.contestant import Run, steady_rate
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


class EngineContestant:
    """Exact KV, no bound on a step: all prompts first, then all decode together."""

    def load(self, folder: str) -> None:
        spec = EngineSpec(
            model_path=folder,
            role="decode",
            threads=1,
            max_batch=32,
            kv_tokens=16384,
            kv_precision="exact",
            step_budget_ms=0.0,
        )
        self._engine = load(spec, plan, lambda _what, _fraction: None).engine
        self._handle = 0

    def run(self, prompts: list[list[int]], new_tokens: int) -> Run:
        sampling = Sampling(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        began = time.perf_counter()
        stamps: dict[int, list[float]] = {}
        tokens: dict[int, list[int]] = {}
        for prompt in prompts:
            self._handle += 1
            name, root = str(self._handle), self._handle.to_bytes(16, "little")  # shares no prefix
            wanted = Request(id=name, prompt=tuple(prompt), sampling=sampling, cache_root=root)
            self._engine.generate(self._handle, wanted)
            stamps[self._handle], tokens[self._handle] = [], []
        while step := self._engine.plan():
            for out in self._engine.run(step):
                stamps[out.handle].append(time.perf_counter())
                tokens[out.handle].append(out.token)
        wall = time.perf_counter() - began
        return Run(wall, steady_rate(list(stamps.values())), list(tokens.values()))
