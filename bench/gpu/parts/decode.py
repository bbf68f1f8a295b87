"""Decode steps of an engine in this process, beside the limits of the machine.

The floor of a step is its bytes (weights, and the KV of all sequences) over the bandwidth of a
large copy, or its operations over the rate of a large product where that is more. Times are wall
times between points at which the tokens are on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu.models import (
    drop_all,
    fill_pool,
    fitting_pages,
    make_engine,
    pages_of,
    place,
    random_model,
    timed_steps,
)
from bench.gpu.part import GpuResult, PartContext
from bench.lib.report import median, percentile
from bench.lib.roofline import ModelCost
from engine.execution.engine import Engine

WARM_STEPS = 8
PROFILED_STEPS = 8
DECODE_AIMS = {1: 1 / 1.15, 64: 1 / 1.3}
"""Ratio of the floor to the step that is aimed at, by batch."""

CHUNK = 512
"""Prompt tokens of the warm-up; no prompt is computed afterwards."""


@dataclass(frozen=True)
class DecodeSizes:
    """``profiled`` is the (batch, context) whose kernels ``--profile`` prints."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int
    profiled: tuple[tuple[int, int], ...]

    @property
    def new_tokens(self) -> int:
        return WARM_STEPS + self.steps + PROFILED_STEPS + 4


FULL = DecodeSizes((1, 16, 64, 256), (1024, 8192, 32768), 128, ((1, 1024), (64, 8192)))
TINY = DecodeSizes((1, 4), (64,), 8, ((4, 64),))


def sizes_of(context: PartContext) -> DecodeSizes:
    return TINY if context.tiny else FULL


def measure_decode(context: PartContext) -> None:
    """Measure the part ``decode``: fp8 KV, every batch and context that fits into the memory."""
    sizes = sizes_of(context)
    longest = max(sizes.contexts) + sizes.new_tokens
    model = random_model(context, longest)
    largest = pages_of(max(sizes.batches), longest)
    pages = fitting_pages(context, model, largest)
    engine = make_engine(
        model, pages=pages, max_batch=max(sizes.batches), chunk=CHUNK, max_model_len=longest
    )
    fill_pool(engine)
    cost = ModelCost.of(model, engine.format.bytes_per_token)
    context.add(GpuResult("weights that a step reads", model.weights.bytes / 2**30, "GiB"))
    for length in sizes.contexts:
        for batch in sizes.batches:
            if pages_of(batch, length + sizes.new_tokens) > pages:
                context.note(f"decode, batch {batch}, context {length}: does not fit")
                continue
            _measure_cell(context, engine, cost, batch, length)
    if not context.on_cpu:
        peak = torch.cuda.max_memory_allocated(context.device)
        context.add(GpuResult("peak memory of decode", peak / 2**30, "GiB"))


def _measure_cell(
    context: PartContext, engine: Engine, cost: ModelCost, batch: int, length: int
) -> None:
    sizes = sizes_of(context)
    place(engine, batch, length, sizes.new_tokens)
    taken = timed_steps(engine, WARM_STEPS, sizes.steps)
    middle, late = median(taken), percentile(taken, 0.99)
    floor = cost.decode(context.limits, batch, length + WARM_STEPS + sizes.steps / 2)
    at = f"decode, batch {batch}, context {length}"
    text = f"floor ({floor.wall}) {floor.seconds * 1e3:.3g} ms; {batch / middle:.0f} tok/s"
    aim = DECODE_AIMS.get(batch)
    context.add(
        GpuResult(at, middle * 1e3, "ms", text, floor.seconds / middle, aim),
        GpuResult(f"{at}: p99", late * 1e3, "ms", "the median", middle / late),
    )
    if context.job.profile and (batch, length) in sizes.profiled:
        table = kernel_table(context, lambda: timed_steps(engine, 0, PROFILED_STEPS))
        context.note(f"{at}, {PROFILED_STEPS} steps\n{table}")
    assert len(engine.scheduler.decoding) == batch
    drop_all(engine)


def kernel_table(context: PartContext, call: Callable[[], object]) -> str:
    """Return the kernels that take most of the time of ``call``, as a table of torch.profiler."""
    activities = [ProfilerActivity.CPU, *([] if context.on_cpu else [ProfilerActivity.CUDA])]
    with profile(activities=activities) as found:
        call()
        context.synchronize()
    key = "self_cpu_time_total" if context.on_cpu else "self_device_time_total"
    table: str = found.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=70)
    return table
