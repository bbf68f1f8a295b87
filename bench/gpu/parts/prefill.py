"""Prefills of one prompt by an engine in this process, beside the rate of a large product.

A prompt is timed from its arrival until its first token is on the host, with fp8 KV. The ratio is
the share of the rate: the time that its operations alone would take, over the time that it took.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from bench.gpu.models import (
    drop_all,
    make_engine,
    pages_of,
    random_model,
    random_request,
    release_memory,
)
from bench.gpu.part import GpuResult, PartContext
from bench.lib.report import median
from bench.lib.roofline import ModelCost
from engine.execution.engine import Engine
from engine.model.decoder import DecoderModel

PREFILL_AIM = 0.6
PREFILLS = 3
"""Prompts of each length that are timed, after one that is not."""


@dataclass(frozen=True)
class PrefillSizes:
    prompts: tuple[int, ...]
    chunks: tuple[int, ...]


FULL = PrefillSizes((128, 512, 2048, 4096, 8192), (2048, 8192))
TINY = PrefillSizes((128,), (32, 128))


def sizes_of(context: PartContext) -> PrefillSizes:
    return TINY if context.tiny else FULL


def measure_prefill(context: PartContext) -> None:
    """Measure the part ``prefill``: one prompt at a time, with fp8 KV."""
    sizes = sizes_of(context)
    longest = max(sizes.prompts) + 1
    model = random_model(context, longest)
    for chunk in sizes.chunks:
        _measure_chunk(context, model, chunk, longest)
        release_memory(context)


def _measure_chunk(context: PartContext, model: DecoderModel, chunk: int, longest: int) -> None:
    pages = pages_of(1, longest)
    engine = make_engine(model, pages=pages, max_batch=4, chunk=chunk, max_model_len=longest)
    cost = ModelCost.of(model, engine.format.bytes_per_token)
    for length in sizes_of(context).prompts:
        middle = median([_prefill_s(engine, length, i) for i in range(PREFILLS + 1)][1:])
        floor = cost.prefill(context.limits, 1, length)
        name = f"prefill of {length}, chunk {chunk}"
        text = f"operations {floor.operations_s * 1e3:.3g} ms; {length / middle:.0f} tok/s"
        ratio = floor.operations_s / middle
        context.add(GpuResult(name, middle * 1e3, "ms", text, ratio, PREFILL_AIM))


def _prefill_s(engine: Engine, length: int, seed: int) -> float:
    """Return the seconds from a prompt to its first token while nothing else runs."""
    engine.generate(0, random_request(engine.model.config.vocab_size, seed, length, 1))
    began = time.perf_counter()
    while plan := engine.plan():
        engine.run(plan)
    taken = time.perf_counter() - began
    drop_all(engine)
    return taken
