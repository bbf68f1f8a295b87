"""From a model and a GPU to a machine as the sizing policy knows one: the roofline. Pure.

Products with weights, and attention, take max(FLOPs / FLOP/s, bytes / bytes/s) each (Williams et
al., "Roofline", 2009), one after the other, and a step some overhead beside. The policy's model of
a step is linear, so its coefficients are chords of that: exact for a step with hardly any work, for
one with the batch that the objectives allow, and for a full chunk; between them a chord of a convex
function lies above it, so that a plan errs on the safe side.
(Weights of experts are the exception: which a batch reads is concave in its size.)
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from cluster.planner.gpus import Gpu, known
from cluster.planner.model_shape import Shape, Work
from cluster.planner.speculation_grid import Cell, DraftMachine, cell
from cluster.sizing.snapshot import Machine
from engine.execution.memory_footprint import GPU_KV_SHARE, RUNTIME_BYTES
from engine.scheduling.sequence import MOST_NODES
from engine.speculation.control.draft_choice import Curve
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import StartupError
from router.placement.step_model import StepModel


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of a data sheet's figures that steps reach, and what each costs beside. Large prompts
    reach 76% of the FLOPs on TPUs (Pope et al., "Efficiently Scaling Transformer Inference", 2022),
    GPUs less; steps that decode 60 to 85% of the bandwidth. These are assumptions, to be replaced
    by what a live cluster measures."""

    compute: float = 0.5
    bandwidth: float = 0.7
    overhead_s: float = 1e-3  # launches, drawing, what Python does between steps


ASSUMED = Efficiency()
SPEED_OF_LIGHT = Efficiency(compute=1.0, bandwidth=1.0, overhead_s=0.0)


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What steps reach on a GPU: FLOP/s, bytes/s, seconds."""

    flops: float
    bytes_s: float
    overhead_s: float

    def seconds(self, of: Work) -> float:
        """A step, its overhead included."""
        linear = max(of.linear_flops / self.flops, of.weight_bytes / self.bytes_s)
        attention = max(of.attention_flops / self.flops, of.kv_bytes / self.bytes_s)
        return linear + attention + self.overhead_s


def rates(gpu: Gpu, of: Efficiency) -> Rates:
    return Rates(
        flops=gpu.flops * of.compute,
        bytes_s=gpu.bytes_s * of.bandwidth,
        overhead_s=of.overhead_s,
    )


def decode_s(shape: Shape, at: Rates, batch: float, context: float) -> float:
    """A step in which ``batch`` sequences of ``context`` tokens each decode."""
    return at.seconds(shape.decode(batch, context))


def prefill_s(shape: Shape, at: Rates, cached: int, tokens: int, chunk: int) -> float:
    """A prompt of ``tokens`` tokens after ``cached`` ones, alone, chunk by chunk."""
    seconds, done = 0.0, cached
    while done < cached + tokens:
        count = min(chunk, cached + tokens - done)
        seconds += at.seconds(shape.prompt(done, count))
        done += count
    return seconds


def batch_within(shape: Shape, at: Rates, seconds: float, context: float, most: int) -> int:
    """Most sequences, up to ``most``, whose step takes no longer; 0: not even one."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        if decode_s(shape, at, middle, context) <= seconds:
            low = middle
        else:
            high = middle
    return low


def step_model(shape: Shape, at: Rates, batch: int, context: float, chunk: int) -> StepModel:
    """Chords of the roofline from nothing to ``batch`` sequences of ``context`` tokens, and to a
    whole ``chunk``."""
    alone = at.overhead_s + shape.cost.weight_bytes(1) / at.bytes_s
    full = decode_s(shape, at, batch, context)
    share = shape.reached(context) / context if context else 0.0  # layers with a window: less
    kv_token = share * max(shape.cost.pair_flops / at.flops, shape.cost.kv_bytes / at.bytes_s)
    row = (full - alone) / batch - kv_token * context
    row = row if row > 1e-12 else 0.0  # nothing but rounding
    prompt = at.seconds(shape.prompt(0, chunk))
    whole = sum(count for window, count in shape.cost.reaches if not window)
    pair = whole * shape.cost.pair_flops / at.flops
    token = max(0.0, (prompt - alone - pair * chunk * chunk / 2) / chunk)
    return StepModel(alone, row, kv_token, token + _in_windows(shape, chunk) / at.flops, pair)


def _in_windows(shape: Shape, chunk: int) -> float:
    """FLOPs of a prompt's token in layers with a window, far from the prompt's beginning, beyond
    those in its first chunk."""
    further = sum(n * max(0.0, w - chunk / 2) for w, n in shape.cost.reaches if w)
    return further * shape.cost.pair_flops


def kv_tokens(shape: Shape, gpu: Gpu, kv_share: float = GPU_KV_SHARE) -> int:
    """Tokens of the KV pool that a worker takes by itself (``engine/execution/memory_footprint.py``):
    a share of what is free beside the weights. Raises StartupError for a model that does not fit."""
    free = gpu.memory - RUNTIME_BYTES["cuda"] - shape.weight_bytes
    tokens = int(max(0.0, free) * kv_share / shape.kv_bytes) // BLOCK_TOKENS * BLOCK_TOKENS
    if tokens < 2 * BLOCK_TOKENS:
        raise StartupError(_too_large(shape, gpu))
    return tokens


def _too_large(shape: Shape, gpu: Gpu) -> str:
    wanted = shape.weight_bytes + RUNTIME_BYTES["cuda"] + 2 * BLOCK_TOKENS * shape.kv_bytes
    fitting = [g.name for g in known().values() if g.memory > wanted / GPU_KV_SHARE]
    hint = f"it fits {', '.join(fitting)}" if fitting else "no GPU that is known holds it"
    return (
        f"{shape.name} takes {shape.weight_bytes / 2**30:.1f} GiB of weights and"
        f" {shape.kv_bytes / 2**20:.3g} MiB of KV for each token, more than the {gpu.gib:g} GiB of"
        f" {gpu.name}; a worker is one GPU, and {hint}"
    )


def machine(
    shape: Shape,
    gpu: Gpu,
    *,
    context: float,
    tpot_s: float,
    chunk: int = 512,
    max_batch: int = 64,
    pace: float = 1.0,
    efficiency: Efficiency = ASSUMED,
    link_bytes_s: float | None = None,
    pool: int | None = None,
) -> Machine:
    """A worker on ``gpu``. ``context``: tokens that a sequence holds on average while it decodes;
    ``tpot_s``: the objective, at which the batch is largest; ``pace``: tokens in a step, above 1
    with speculation; ``link_bytes_s`` None: as the data file has it; ``pool``: tokens of KV, None:
    what the worker would take. Raises StartupError for a model that does not fit."""
    tokens = kv_tokens(shape, gpu)
    tokens = tokens if pool is None else min(pool, tokens)
    at = rates(gpu, efficiency)
    fitting = max(1, min(max_batch, math.floor(tokens / max(1.0, context))))
    working = max(1, batch_within(shape, at, tpot_s * pace, context, fitting))
    return Machine(
        step=step_model(shape, at, working, context, chunk),
        chunk=chunk,
        max_batch=max_batch,
        kv_tokens=tokens,
        kv_bytes=shape.wire_bytes(shape.codec),
        link_bytes_s=gpu.link_gb_per_s * 1e9 if link_bytes_s is None else link_bytes_s,
    )


# MERGED cluster.plan.drafts
# What speculation brings on a machine made up: the controller's own choice of drafts. Pure.

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)


class Drafting(msgspec.Struct, frozen=True, kw_only=True):
    """``acceptance``: of a drafted token once the one before it is; ``cost``: of a draft pass, as
    a share of a plain step (n-grams: 0; a model ten times smaller: 0.1); ``most``: tokens that
    are drafted for a sequence in a step."""

    acceptance: float
    cost: float = 0.0
    most: int = 8


def drafted(
    shape: Shape, at: Rates, batch: int, context: float, acceptance: float, of: Drafting
) -> Cell:
    """What is best for ``batch`` sequences of ``context`` tokens each. KV is read once for each
    sequence, however many of its rows are verified."""
    plain = shape.decode(batch, context)
    rows = np.arange(1, batch + min(batch * of.most, MOST_NODES) + 1) / batch
    weights = np.array([shape.cost.weight_bytes(round(n * batch)) for n in rows])
    passes = np.maximum(rows * plain.linear_flops / at.flops, weights / at.bytes_s)
    passes += np.maximum(rows * plain.attention_flops / at.flops, plain.kv_bytes / at.bytes_s)
    passes += at.overhead_s
    draft = of.cost * decode_s(shape, at, batch, context)
    machine = DraftMachine(Curve(passes), Curve([draft] * batch) if draft else None)
    return cell(machine, batch, acceptance, of.most)


def pace(shape: Shape, at: Rates, batch: int, context: float, of: Drafting) -> float:
    """Tokens that a sequence gets in the time of a plain step; 1 where drafts do not pay."""
    return drafted(shape, at, batch, context, of.acceptance, of).speedup


def settled_pace(
    shape: Shape, at: Rates, context: float, tpot_s: float, most: int, of: Drafting
) -> float:
    """That the largest batch, up to ``most``, has which meets the objective with it: drafts that
    pay in a small batch may not in a large one."""
    low, high = 1, most + 1  # both the step and what drafts bring get worse with the batch
    while high - low > 1:
        middle = (low + high) // 2
        if decode_s(shape, at, middle, context) <= tpot_s * pace(shape, at, middle, context, of):
            low = middle
        else:
            high = middle
    return pace(shape, at, low, context, of)


def pays_up_to(
    shape: Shape, at: Rates, context: float, acceptance: float, of: Drafting, most: int
) -> int:
    """The largest batch, up to ``most``, at which drafts pay; 0: none. (The roofline has no steps,
    so there are no gaps below it.)"""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        if drafted(shape, at, middle, context, acceptance, of).nodes:
            low = middle
        else:
            high = middle
    return low
