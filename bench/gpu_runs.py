"""Decode and prefill of one engine in this process, timed. Any device; no Ray, no Redis."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.report import median
from decode_worker.policy import plan
from engine.core import Engine, EngineConfig
from engine.kv_format import Precision
from engine.model import Model
from engine.sequence import blocks_for
from protocol.request import Request, Sampling

WARM_STEPS = 8
"""Decode steps that do not count."""

PREFILLS = 3
"""Prompts that count, after one that does not."""


@dataclass(frozen=True)
class Sizes:
    batches: Sequence[int]
    context: int  # tokens of each prompt before decoding
    steps: int  # decode steps that count
    prompt: int  # tokens of the prompt to prefill
    chunk: int

    @property
    def new_tokens(self) -> int:
        """No sequence ends while steps are counted: the first one decodes while the others are
        prefilled."""
        each = -(-self.context // self.chunk) + 1
        return each * max(self.batches) + WARM_STEPS + self.steps

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.prompt + 1, self.context + self.new_tokens)


def engine_for(model: Model, sizes: Sizes, precision: Precision) -> Engine:
    """As a worker on a GPU would have it: fp8 KV is stored as bytes."""
    each = blocks_for(sizes.context + sizes.new_tokens)
    config = EngineConfig(
        pages=max(max(sizes.batches) * each, blocks_for(sizes.prompt + 1)),
        max_batch=max(sizes.batches),
        chunk=sizes.chunk,
        max_model_len=sizes.longest,
        step_budget_ms=0.0,
        kv_precision=precision,
        kv_storage="fp8" if precision == "fp8" else "wide",
    )
    return Engine(model, config, plan)


def add(engine: Engine, handle: int, length: int, new_tokens: int) -> None:
    """A greedy request of random tokens that shares no prefix."""
    draw = random.Random(handle)
    prompt = tuple(draw.randrange(engine.model.config.vocab_size) for _ in range(length))
    sampling = Sampling(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    root = os.urandom(16)
    engine.generate(handle, Request(id="bench", prompt=prompt, sampling=sampling, cache_root=root))


def fill(engine: Engine, sizes: Sizes, batch: int) -> None:
    """Prefill ``batch`` prompts and decode until the last of them has run its warm-up."""
    for handle in range(batch):
        add(engine, handle, sizes.context, sizes.new_tokens)
    while len(engine.scheduler.decoding) < batch:
        engine.run(engine.plan())
    timed_steps(engine, WARM_STEPS)


def timed_steps(engine: Engine, steps: int) -> tuple[float, float]:
    """Median seconds of a decode step, and KV tokens that a step attends to on average. A step ends
    when its tokens are on the host."""
    taken, attended = [], 0
    for _ in range(steps):
        began = time.perf_counter()
        step = engine.plan()
        engine.run(step)
        taken.append(time.perf_counter() - began)
        assert not step.chunks
        attended += step.work.decode_kv_tokens
    return median(taken), attended / steps


def decode(engine: Engine, sizes: Sizes, batch: int) -> tuple[float, float]:
    """``timed_steps`` of ``batch`` sequences; they are gone afterwards."""
    fill(engine, sizes, batch)
    measured = timed_steps(engine, sizes.steps)
    assert len(engine.scheduler.decoding) == batch
    for handle in range(batch):
        engine.drop(handle)
    return measured


def prefill(engine: Engine, sizes: Sizes) -> float:
    """Median seconds from a prompt to its first token, in chunks; nothing else runs."""
    taken = []
    for handle in range(PREFILLS + 1):
        add(engine, handle, sizes.prompt, 1)
        began = time.perf_counter()
        while step := engine.plan():
            engine.run(step)
        taken.append(time.perf_counter() - began)
    return median(taken[1:])
