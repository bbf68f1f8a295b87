"""Outcomes of steps, as numbers to learn from. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.speculation.choice import Vector
from engine.speculation.lengths import Outcome

FOLLOW = 1.0 / 64
"""Weight of a step in the measured figures."""


@dataclass
class Measured:
    """Figures of the steps that speculated of late, as ratios of decayed sums."""

    _plain_s: float = 0.0  # that plain steps would have taken for the same tokens
    _took_s: float = 0.0
    _proposed: float = 0.0
    _accepted: float = 0.0

    @property
    def speedup(self) -> float:
        """Tokens per second, over those of plain steps; 1.0 where nothing speculated."""
        return self._plain_s / self._took_s if self._took_s > 0 else 1.0

    @property
    def acceptance(self) -> float:
        """Of the proposed nodes."""
        return self._accepted / self._proposed if self._proposed > 0 else 0.0

    def observe(self, outcome: Outcome, plain_s: float) -> None:
        """``plain_s``: of a plain step of this batch."""
        batch, accepted = len(outcome.sequences), sum(map(len, outcome.accepted))
        keep = 1.0 - FOLLOW
        self._plain_s = keep * self._plain_s + plain_s * (batch + accepted) / batch
        self._took_s = keep * self._took_s + outcome.step_s
        self._proposed = keep * self._proposed + sum(outcome.proposed)
        self._accepted = keep * self._accepted + accepted


def counted(outcome: Outcome, most: int) -> tuple[NDArray[np.int64], Vector, Vector, Vector]:
    """Who was asked for [A], as indices of sequences; and [A, most] of zeros and ones: whether each
    node was asked for, proposed, and accepted."""
    asked = np.asarray(outcome.asked)
    who = np.flatnonzero(asked)
    places = np.arange(most)
    wanted = (places < asked[who, None]).astype(np.float64)
    proposed = np.zeros_like(wanted)
    accepted = np.zeros_like(wanted)
    if outcome.proposed:
        proposed += places < np.asarray(outcome.proposed)[who, None]
        rows = enumerate(who.tolist())
        met = [row * most + node for row, index in rows for node in outcome.accepted[index]]
        accepted.ravel()[met] = 1.0
    return who, wanted, proposed, accepted
