"""What speculation is worth on a machine: the controller's own choice, batch by batch.

Pure; torch-free. For one sequence whose draft costs a share c of a step, it is the formula of
engine/speculation/choice.py; for batches the cost of verifying is what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from engine.draft_pages import MOST_NODES
from engine.speculation.choice import Prices, choose
from engine.speculation.controller import MARGIN
from engine.speculation.curve import Curve

ACCEPTANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class DraftMachine:
    """Seconds of a pass by its rows: of the model, and of its draft (None: drafts for nothing)."""

    model: Curve
    draft: Curve | None
    where: str = ""  # processor, threads and type that they were measured with


class Cell(msgspec.Struct, frozen=True):
    """One batch at one acceptance: what the controller would settle on."""

    batch: int
    acceptance: float
    nodes: float  # for each sequence, on average; 0: nothing pays
    tokens: float  # of a step, for each sequence
    plain_ms: float  # of a step without
    verify_ms: float  # of the model's pass
    draft_ms: float
    speedup: float


def cell(machine: DraftMachine, batch: int, acceptance: float, most: int) -> Cell:
    """With chains of at most ``most`` tokens for each sequence, and of what a step takes."""
    most = min(most, max(1, MOST_NODES // batch))
    gains = np.tile(acceptance ** np.arange(1.0, most + 1.0), (batch, 1))
    a_pass = 0.0 if machine.draft is None else machine.draft(batch)
    verify = machine.model.span(batch, batch * (1 + most))
    plain = float(verify[0])
    passes = np.arange(most + 1)
    choice = choose(gains, np.ones_like(gains), Prices(plain, verify, passes, a_pass))
    if choice.speedup < 1.0 + MARGIN:
        return Cell(batch, acceptance, 0.0, 1.0, plain * 1e3, plain * 1e3, 0.0, 1.0)
    nodes, longest = sum(choice.counts), max(choice.counts)
    return Cell(
        batch,
        acceptance,
        nodes / batch,
        choice.tokens / batch,
        plain * 1e3,
        float(verify[nodes]) * 1e3,
        a_pass * longest * 1e3,
        choice.speedup,
    )


def grid(
    machine: DraftMachine, batches: Sequence[int], acceptances: Sequence[float], most: int
) -> list[Cell]:
    """All of them, batch by batch."""
    return [cell(machine, b, a, most) for b in batches for a in acceptances]


def break_even(machine: DraftMachine, acceptance: float, most: int, largest: int) -> int:
    """The last batch, up to ``largest``, of those from 1 on that speculation pays at without a gap;
    0: it does not pay for one sequence. It may pay at some larger ones, too: where rows are padded,
    a batch just above a step of the curve verifies for nothing."""
    gaps = (b for b in range(1, largest + 1) if not cell(machine, b, acceptance, most).nodes)
    return next(gaps, largest + 1) - 1
