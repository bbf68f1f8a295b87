"""One engine in this process, without HTTP, queues or a KV transfer, and a closed loop of requests.

`bench.stack` compares the whole stack with it.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from bench.lib.report import median
from bench.lib.settings import engine_settings
from engine.execution.engine import Engine
from engine.execution.loading import load_engine
from engine.scheduling.step_policy import plan_decode_step
from protocol.requests import Request
from protocol.sampling_params import SamplingParams


@dataclass(frozen=True)
class ClosedLoopWorkload:
    """``requests`` prompts of random tokens, of which ``streams`` are under way at any time."""

    streams: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    vocab: int
    seed: int

    def prompts(self) -> list[list[int]]:
        """Return prompts that share no prefix, so that no cache helps."""
        draw = random.Random(self.seed)
        return [
            [draw.randrange(3, self.vocab) for _ in range(self.prompt_tokens)]
            for _ in range(self.requests)
        ]


@dataclass
class TokenTiming:
    """When the tokens of one request came, in seconds since it was sent."""

    first: float = 0.0
    last: float = 0.0
    tokens: int = 0

    def add(self, at: float, count: int) -> None:
        if not self.tokens:
            self.first = at
        self.last = at
        self.tokens += count

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first."""
        return (self.last - self.first) / max(1, self.tokens - 1)


class ServingOutcome(msgspec.Struct, frozen=True):
    """Medians over the requests, and tokens per second over the whole run."""

    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float


def summarize(timings: list[TokenTiming], wall_s: float) -> ServingOutcome:
    return ServingOutcome(
        median([t.first for t in timings]) * 1e3,
        median([t.tpot for t in timings]) * 1e3,
        sum(t.tokens for t in timings) / wall_s,
    )


def bare_engine(model: Path) -> Engine:
    """Load an engine as a decode worker does, with one compute thread."""
    torch.set_num_threads(1)
    spec = engine_settings(str(model), threads=1)
    return load_engine(spec, plan_decode_step, lambda _what, _fraction: None).engine


def run_bare(engine: Engine, workload: ClosedLoopWorkload) -> ServingOutcome:
    """Run the workload on ``engine`` in this thread."""
    waiting = workload.prompts()
    sampling = SamplingParams(temperature=0.0, max_tokens=workload.output_tokens, ignore_eos=True)
    sent: dict[int, float] = {}
    timings: dict[int, TokenTiming] = {}
    running = 0
    began = time.perf_counter()
    while waiting or running:
        while waiting and running < workload.streams:
            handle = len(sent) + 1
            prompt = tuple(waiting.pop())
            request = Request(
                id=str(handle), prompt=prompt, sampling=sampling, cache_root=bytes(16)
            )
            sent[handle], timings[handle] = time.perf_counter(), TokenTiming()
            engine.generate(handle, request)
            running += 1
        for out in engine.run(engine.plan()):
            timings[out.handle].add(time.perf_counter() - sent[out.handle], 1)
            running -= out.finish != 0
    return summarize(list(timings.values()), time.perf_counter() - began)
