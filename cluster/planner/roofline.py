"""The roofline: from a model and a GPU to a machine model of the sizing policy. Pure.

Products with weights, and attention, take max(FLOPs / FLOP/s, bytes / bytes/s) each (Williams et
al., "Roofline", 2009), one after the other, and a step has some overhead. The policy's model of a
step is linear, so its coefficients are chords of the roofline: exact for a step with hardly any
work, for one with the batch that the objectives allow, and for a full chunk. Between them a chord
of a convex function lies above it, so that a plan errs on the safe side. (Expert weights are the
exception: the bytes that a batch reads are concave in its size.)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np

from cluster.planner.gpus import GpuSpec, known_gpus
from cluster.planner.model_shape import ModelShape, PassWork
from cluster.planner.speculation_grid import PassTimes, SpeculationCell, speculation_cell
from cluster.sizing.snapshot import MachineModel
from engine.execution.memory_footprint import RUNTIME_BYTES
from engine.ipc.settings import StepSizes, default_step_sizes
from engine.scheduling.draft_pages import MAX_DRAFT_NODES
from engine.speculation.control.latency_curve import LatencyCurve
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import StartupError
from protocol.performance.step_model import StepModel
from protocol.roles import Role

PLANNED_KV_SHARE = 0.8
"""Share of a GPU's memory beside the weights that holds KV in a plan. A worker counts exactly, with
the shapes of its model and 10% in reserve (``engine/execution/memory_footprint.py``): Llama-3-8B
gets 0.84 on an H200 and 0.78 on an H100."""


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of a data sheet's figures that steps reach, and the overhead of each step.

    Large prompts reach 76% of the FLOPs on TPUs (Pope et al., "Efficiently Scaling Transformer
    Inference", 2022), less on GPUs; decode steps reach 60 to 85% of the bandwidth. These are
    assumptions, to be replaced by what a live cluster measures.
    """

    compute: float = 0.5
    bandwidth: float = 0.7
    overhead_s: float = 1e-3  # kernel launches, sampling, Python code between steps


ASSUMED = Efficiency()
SPEED_OF_LIGHT = Efficiency(compute=1.0, bandwidth=1.0, overhead_s=0.0)


class GpuRates(msgspec.Struct, frozen=True, kw_only=True):
    """The rates that steps reach on a GPU."""

    flops: float
    bytes_s: float
    overhead_s: float

    def seconds(self, work: PassWork) -> float:
        """Return the duration of a step, overhead included."""
        linear = max(work.linear_flops / self.flops, work.weight_bytes / self.bytes_s)
        attention = max(work.attention_flops / self.flops, work.kv_bytes / self.bytes_s)
        return linear + attention + self.overhead_s


def gpu_rates(gpu: GpuSpec, efficiency: Efficiency) -> GpuRates:
    return GpuRates(
        flops=gpu.flops * efficiency.compute,
        bytes_s=gpu.bytes_s * efficiency.bandwidth,
        overhead_s=efficiency.overhead_s,
    )


def decode_step_s(shape: ModelShape, at: GpuRates, batch: float, context: float) -> float:
    """Return the seconds of a step in which ``batch`` sequences of ``context`` tokens each
    decode."""
    return at.seconds(shape.decode(batch, context))


def prefill_s(shape: ModelShape, at: GpuRates, cached: int, tokens: int, chunk: int) -> float:
    """Return the seconds of a prompt of ``tokens`` tokens after ``cached`` ones, alone, chunk by
    chunk."""
    seconds, done = 0.0, cached
    while done < cached + tokens:
        count = min(chunk, cached + tokens - done)
        seconds += at.seconds(shape.prompt(done, count))
        done += count
    return seconds


def largest_batch_within(
    shape: ModelShape, at: GpuRates, seconds: float, context: float, most: int
) -> int:
    """Return the most sequences, up to ``most``, whose step takes at most ``seconds``; 0: not even
    one."""
    return largest_where(lambda n: decode_step_s(shape, at, n, context) <= seconds, 0, most)


def largest_where(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest number from ``low`` to ``high`` for which ``holds``, by bisection.

    It must hold up to some number and for none above it; ``low`` is not checked.
    """
    high += 1
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def step_model(
    shape: ModelShape, at: GpuRates, batch: int, context: float, chunk: int
) -> StepModel:
    """Return the chords of the roofline from nothing to ``batch`` sequences of ``context`` tokens,
    and to a whole ``chunk``."""
    alone = at.overhead_s + shape.cost.weight_bytes(1) / at.bytes_s
    full = decode_step_s(shape, at, batch, context)
    share = shape.reached(context) / context if context else 0.0  # layers with a window: less
    kv_token = share * max(shape.cost.pair_flops / at.flops, shape.cost.kv_bytes / at.bytes_s)
    row = (full - alone) / batch - kv_token * context
    row = row if row > 1e-12 else 0.0  # a rounding error
    prompt = at.seconds(shape.prompt(0, chunk))
    whole = sum(count for window, count in shape.cost.reaches if not window)
    pair = whole * shape.cost.pair_flops / at.flops
    token = max(0.0, (prompt - alone - pair * chunk * chunk / 2) / chunk)
    return StepModel(alone, row, kv_token, token + _in_windows(shape, chunk) / at.flops, pair)


def _in_windows(shape: ModelShape, chunk: int) -> float:
    """Return the FLOPs of a prompt token in layers with a window, far from the prompt's beginning,
    beyond those in its first chunk."""
    further = sum(n * max(0.0, w - chunk / 2) for w, n in shape.cost.reaches if w)
    return further * shape.cost.pair_flops


def kv_pool_tokens(shape: ModelShape, gpu: GpuSpec, kv_share: float = PLANNED_KV_SHARE) -> int:
    """Return about as many tokens as the KV pool of a worker has by default: a share of what is
    free beside the weights. Raises StartupError for a model that does not fit."""
    free = gpu.memory - RUNTIME_BYTES["cuda"] - shape.weight_bytes
    tokens = int(max(0.0, free) * kv_share / shape.kv_bytes) // BLOCK_TOKENS * BLOCK_TOKENS
    if tokens < 2 * BLOCK_TOKENS:
        raise StartupError(_too_large(shape, gpu))
    return tokens


def _too_large(shape: ModelShape, gpu: GpuSpec) -> str:
    wanted = shape.weight_bytes + RUNTIME_BYTES["cuda"] + 2 * BLOCK_TOKENS * shape.kv_bytes
    fitting = [g.name for g in known_gpus().values() if g.memory > wanted / PLANNED_KV_SHARE]
    hint = f"it fits {', '.join(fitting)}" if fitting else "no GPU that is known holds it"
    return (
        f"{shape.name} takes {shape.weight_bytes / 2**30:.1f} GiB of weights and"
        f" {shape.kv_bytes / 2**20:.3g} MiB of KV for each token, more than the {gpu.gib:g} GiB of"
        f" {gpu.name}; a worker is one GPU, and {hint}"
    )


def gpu_step_sizes(role: Role, max_batch: int | None, chunk: int | None) -> StepSizes:
    """Return the largest step of a worker on a GPU; None leaves a size to the worker's default."""
    default = default_step_sizes("cuda", role)
    return StepSizes(max_batch or default.max_batch, chunk or default.prefill_chunk)


def machine_model(
    shape: ModelShape,
    gpu: GpuSpec,
    *,
    context: float,
    tpot_s: float,
    chunk: int = 512,
    max_batch: int = 64,
    pace: float = 1.0,
    efficiency: Efficiency = ASSUMED,
    link_bytes_s: float | None = None,
    pool: int | None = None,
) -> MachineModel:
    """Return the machine model of a worker on ``gpu``.

    ``context``: mean tokens of a sequence while it decodes. ``tpot_s``: the objective, at which the
    batch is largest. ``pace``: tokens in a step, above 1 with speculation. ``link_bytes_s`` None:
    as in the data file. ``pool``: KV tokens, None: what the worker would take. Raises StartupError
    for a model that does not fit.
    """
    tokens = kv_pool_tokens(shape, gpu)
    tokens = tokens if pool is None else min(pool, tokens)
    at = gpu_rates(gpu, efficiency)
    fitting = max(1, min(max_batch, math.floor(tokens / max(1.0, context))))
    working = max(1, largest_batch_within(shape, at, tpot_s * pace, context, fitting))
    return MachineModel(
        step=step_model(shape, at, working, context, chunk),
        chunk=chunk,
        max_batch=max_batch,
        kv_tokens=tokens,
        kv_bytes=shape.wire_bytes(shape.codec),
        link_bytes_s=gpu.link_gb_per_s * 1e9 if link_bytes_s is None else link_bytes_s,
    )


BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)


class DraftingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``acceptance``: of a drafted token once the one before it is accepted. ``cost``: of a draft
    pass, as a share of a plain step (n-grams: 0; a model ten times smaller: 0.1). ``most``: drafted
    tokens of a sequence in a step."""

    acceptance: float
    cost: float = 0.0
    most: int = 8


def best_drafts(
    shape: ModelShape,
    at: GpuRates,
    batch: int,
    context: float,
    acceptance: float,
    options: DraftingOptions,
) -> SpeculationCell:
    """Return the controller's best choice of drafts for ``batch`` sequences of ``context`` tokens
    each. KV is read once for each sequence, however many of its rows are verified."""
    plain = shape.decode(batch, context)
    rows = np.arange(1, batch + min(batch * options.most, MAX_DRAFT_NODES) + 1) / batch
    weights = np.array([shape.cost.weight_bytes(round(n * batch)) for n in rows])
    passes = np.maximum(rows * plain.linear_flops / at.flops, weights / at.bytes_s)
    passes += np.maximum(rows * plain.attention_flops / at.flops, plain.kv_bytes / at.bytes_s)
    passes += at.overhead_s
    draft = options.cost * decode_step_s(shape, at, batch, context)
    machine = PassTimes(LatencyCurve(passes), LatencyCurve([draft] * batch) if draft else None)
    return speculation_cell(machine, batch, acceptance, options.most)


def steady_pace(
    shape: ModelShape,
    at: GpuRates,
    context: float,
    tpot_s: float,
    most: int,
    options: DraftingOptions,
) -> float:
    """Return the pace of the largest batch, up to ``most``, that meets the objective with
    speculation: drafts that pay in a small batch may not in a large one."""

    def pace(batch: int) -> float:
        return best_drafts(shape, at, batch, context, options.acceptance, options).speedup

    def meets_tpot(batch: int) -> bool:  # both sides get worse with the batch
        return decode_step_s(shape, at, batch, context) <= tpot_s * pace(batch)

    return pace(largest_where(meets_tpot, 1, most))


def pays_up_to(
    shape: ModelShape,
    at: GpuRates,
    context: float,
    acceptance: float,
    options: DraftingOptions,
    most: int,
) -> int:
    """Return the largest batch, up to ``most``, at which drafts pay; 0: none. (The roofline has no
    steps, so there are no gaps below it.)"""
    return largest_where(
        lambda n: best_drafts(shape, at, n, context, acceptance, options).nodes > 0, 0, most
    )
