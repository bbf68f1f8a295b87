"""Prefills of one prompt by an engine in this process, beside the limits of the machine.

A prompt is timed from its arrival until its first token is on the host, with fp8 KV. The ratio is
that of the floor to the time that it took: its operations over the rate of a large product, or its
bytes over the bandwidth of a large copy where that is more.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass

from bench.gpu.models import (
    drop_all,
    greedy,
    make_engine,
    pages_of,
    place,
    random_model,
    random_request,
    release_memory,
)
from bench.gpu.part import GpuResult, PartContext
from bench.lib.report import median
from bench.lib.roofline import ModelCost
from engine.execution.engine import Engine
from engine.kernels.recording import PROMPT_ROWS
from engine.model.decoder import DecoderModel
from protocol.requests import Request

PREFILL_AIM = 0.6
PREFILLS = 3
"""Prompts of each length that are timed, after one that is not."""


@dataclass(frozen=True)
class PrefillSizes:
    """``cached``: new tokens, and the cached ones before them. ``beside``: tokens of a prompt, and
    the sequences of 1,024 tokens that decode in the same step."""

    prompts: tuple[int, ...]
    chunks: tuple[int, ...]
    cached: tuple[tuple[int, int], ...]
    beside: tuple[int, int]


FULL = PrefillSizes(
    (16, 128, 256, 512, 768, 2048, 4096, 8192),
    (2048, 8192),
    ((86, 2500), (86, 8192), (86, 32768), (400, 8192)),
    (128, 32),
)
TINY = PrefillSizes((128,), (32, 128), ((8, 64),), (16, 2))
BESIDE_TOKENS = 1024


def sizes_of(context: PartContext) -> PrefillSizes:
    return TINY if context.tiny else FULL


def measure_prefill(context: PartContext) -> None:
    """Measure the part ``prefill``: one prompt at a time, with fp8 KV."""
    sizes = sizes_of(context)
    longest = max(*sizes.prompts, *(sum(pair) for pair in sizes.cached)) + 1
    model = random_model(context, longest)
    for chunk in sizes.chunks:
        _measure_chunk(context, model, chunk, max(sizes.prompts) + 1)
        release_memory(context)
    _measure_unrecorded(context, model, sizes.chunks[0])
    release_memory(context)
    _measure_cached(context, model, min(sizes.chunks[0], longest), longest)
    release_memory(context)
    _measure_beside(context, model, sizes.chunks[0])


def _measure_chunk(context: PartContext, model: DecoderModel, chunk: int, longest: int) -> None:
    pages = pages_of(1, longest)
    engine = make_engine(model, pages=pages, max_batch=4, chunk=chunk, max_model_len=longest)
    for length in sizes_of(context).prompts:
        if length < chunk // 4 and chunk != sizes_of(context).chunks[0]:
            continue  # the same step as with smaller chunks
        taken = _prefills(engine, length)
        _add(context, engine, f"prefill of {length}, chunk {chunk}", taken, length)


def _measure_unrecorded(context: PartContext, model: DecoderModel, chunk: int) -> None:
    """Measure without CUDA graphs the prompts that are computed with them."""
    longest, pages = chunk + 1, pages_of(1, chunk + 1)
    engine = make_engine(
        model, pages=pages, max_batch=4, chunk=chunk, max_model_len=longest, recorded=False
    )
    for length in sizes_of(context).prompts:
        if length <= min(chunk, PROMPT_ROWS[-1]):
            name, taken = f"prefill of {length}, without a graph", _prefills(engine, length)
            _add(context, engine, name, taken, length)


def _prefills(engine: Engine, length: int) -> list[float]:
    """Return the seconds of prompts of ``length`` random tokens, one after the other."""
    taken = []
    for seed in range(PREFILLS + 1):
        request = random_request(engine.model.config.vocab_size, seed, length, 1)
        taken.append(_prefill_s(engine, request))
        drop_all(engine)
    return taken[1:]


def _measure_cached(context: PartContext, model: DecoderModel, chunk: int, longest: int) -> None:
    """Measure prompts whose beginning is in the prefix cache, like the turns of an agent."""
    pages = 2 * pages_of(1, longest)
    engine = make_engine(model, pages=pages, max_batch=4, chunk=chunk, max_model_len=longest)
    for new, cached in sizes_of(context).cached:
        draw, root = random.Random(cached), os.urandom(16)
        tokens = tuple(draw.choices(range(model.config.vocab_size), k=cached))
        taken = []
        for i in range(PREFILLS + 2):  # the first one computes what the others find
            prompt = tokens + tuple(draw.choices(range(model.config.vocab_size), k=new * (i > 0)))
            request = Request(id=str(i), prompt=prompt, sampling=greedy(1), cache_root=root)
            taken.append(_prefill_s(engine, request))
        name = f"prefill of {new} behind {cached} cached"
        _add(context, engine, name, taken[2:], new, cached)
        drop_all(engine)


def _measure_beside(context: PartContext, model: DecoderModel, chunk: int) -> None:
    """Measure a step in which a prompt is computed beside sequences that decode."""
    prompt, decoding = sizes_of(context).beside
    length = 64 if context.tiny else BESIDE_TOKENS
    new = 4 * (PREFILLS + 2)
    engine = make_engine(
        model,
        pages=pages_of(decoding, length + new) + pages_of(2, prompt),
        max_batch=decoding + 2,
        chunk=chunk,
        max_model_len=length + new,
    )
    place(engine, decoding, length, new)
    taken: list[float] = []
    for seed in range(PREFILLS + 1):
        engine.generate(10_000 + seed, random_request(model.config.vocab_size, seed, prompt, 1))
        while len(taken) <= seed:
            began = time.perf_counter()
            plan = engine.plan()
            engine.run(plan)
            if plan.chunks and plan.decode:
                taken.append(time.perf_counter() - began)
    cost = ModelCost.of(model, engine.format.bytes_per_token)
    floor = cost.prefill(context.limits, 1, prompt).operations_s
    floor += cost.decode(context.limits, decoding, length).operations_s
    floor = max(floor, cost.decode(context.limits, decoding, length).bytes_s)
    name, middle = f"step with {prompt} of a prompt beside {decoding} sequences", median(taken[1:])
    context.add(GpuResult(name, middle * 1e3, "ms", f"floor {floor * 1e3:.3g} ms", floor / middle))
    drop_all(engine)


def _add(
    context: PartContext, engine: Engine, name: str, taken: list[float], new: int, cached: int = 0
) -> None:
    cost, middle = ModelCost.of(engine.model, engine.format.bytes_per_token), median(taken)
    floor = cost.prefill(context.limits, 1, new, cached)
    text = f"floor ({floor.wall}) {floor.seconds * 1e3:.3g} ms; {new / middle:.0f} tok/s"
    context.add(GpuResult(name, middle * 1e3, "ms", text, floor.seconds / middle, PREFILL_AIM))


def _prefill_s(engine: Engine, request: Request) -> float:
    """Return the seconds from a prompt to its first token while nothing else runs."""
    engine.generate(0, request)
    began = time.perf_counter()
    while plan := engine.plan():
        engine.run(plan)
    return time.perf_counter() - began
