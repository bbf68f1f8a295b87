"""Outcomes of steps, as numbers to learn from. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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


class Evidence:
    """What became of the drafts of steps over the same B sequences, until it is ``taken``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._clear()

    def _clear(self) -> None:
        self._asked: list[Sequence[int]] = []
        self._proposed: list[Sequence[int]] = []
        self._met: list[int] = []  # sequence * most + node

    def __bool__(self) -> bool:
        return bool(self._asked)

    def add(self, outcome: Outcome) -> None:
        self._asked.append(outcome.asked)
        self._proposed.append(outcome.proposed or [0] * len(outcome.asked))
        for index, nodes in enumerate(outcome.accepted):
            if nodes:
                self._met += [index * self._most + node for node in nodes]

    def take(self) -> tuple[Vector, Vector, Vector]:
        """[B, most] each: how often each node was asked for, proposed, accepted."""
        places = np.arange(self._most)
        asked = (np.asarray(self._asked)[:, :, None] > places).sum(axis=0, dtype=np.float64)
        proposed = (np.asarray(self._proposed)[:, :, None] > places).sum(axis=0, dtype=np.float64)
        met = np.bincount(self._met, minlength=asked.size).reshape(asked.shape)
        self._clear()
        return asked, proposed, met.astype(np.float64)
