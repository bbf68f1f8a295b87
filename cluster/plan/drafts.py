"""What speculation brings on a machine made up: the controller's own choice of drafts. Pure."""

from __future__ import annotations

import msgspec
import numpy as np

from cluster.plan.machine import Rates, decode_s
from cluster.plan.shape import Shape
from cluster.plan.speculation import Cell, DraftMachine, cell
from engine.draft_pages import MOST_NODES
from engine.speculation.curve import Curve

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
