"""What a proposed node is worth: the chance that it is accepted, learned from those that were.

For each class of requests, and each place i in the order of proposing, the decayed frequencies with
which an i-th node that was asked for was proposed, and accepted. That holds for chains and trees
alike. Places that were never reached follow from those before.

A sequence differs from its class by one exponent: where the class has gain g, it has g^x. For
chains with acceptance a that is another acceptance, a^x. It comes from what was accepted of the
sequence against what the class expected, shrunk to 1 while little is known. Torch-free.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from engine.speculation.control.draft_choice import Vector

CLASS_MEMORY = 200.0
"""Drafts that a class remembers."""

CLASS_FORGET_STEPS = 512.0
"""Steps after which it is a third as sure: an old verdict does not outweigh what is seen anew."""

SEQUENCE_MEMORY = 16.0
"""Drafts that a sequence remembers ..."""

SEQUENCE_FORGET_STEPS = 128.0
"""... and steps: one that is not asked becomes like its class again."""

PLACE_PRIOR = 1.0
"""Drafts that the guess for a place counts as much as: the place before, one step on."""

SEQUENCE_PRIOR = 3.0
"""Drafts of its class that a sequence begins with."""

EXPONENTS: Vector = np.concatenate(
    [[0.0], 2.0 ** np.arange(-5.0, 3.0, 0.25), 2.0 ** np.arange(3.0, 7.1, 0.5)]
)
"""What a sequence may be, the luckiest first."""


class AcceptanceModel:
    """One class of requests: frequencies of each place, of ``most`` nodes."""

    def __init__(self, most: int) -> None:
        self._asked = np.zeros(most)
        self._proposed = np.zeros(most)
        self._accepted = np.zeros(most)
        self.stale = True  # ``powers`` and ``rows`` are not those of the counts
        self.powers = np.zeros((len(EXPONENTS), most))
        self.rows = np.zeros((len(EXPONENTS), most))

    @property
    def drafts(self) -> float:
        """That the frequencies rest on."""
        return float(self._asked[0])

    @property
    def profile(self) -> Vector:
        """[most] share of the drafts that reached each place."""
        profile: Vector = self._asked / max(1e-9, float(self._asked[0]))
        return profile

    def observe(self, asked: Vector, proposed: Vector, accepted: Vector, steps: int) -> None:
        """Of the drafts of some steps: how many reached each place [most], of those asked for, of
        those proposed, and of those accepted; ``steps`` since the last ones."""
        keep = math.exp(-float(asked[0]) / CLASS_MEMORY - steps / CLASS_FORGET_STEPS)
        for counts, news in (
            (self._asked, asked),
            (self._proposed, proposed),
            (self._accepted, accepted),
        ):
            counts *= keep
            counts += news
        self.stale = True

    def refresh(self) -> None:
        """Work out ``powers`` and ``rows`` [exponents, most]: gains, and chances of being proposed,
        of sequences with each exponent."""
        if self.stale:
            gains, rows = self._estimate()
            self.powers = gains ** EXPONENTS[:, None]
            self.rows = rows ** EXPONENTS[:, None]
            self.stale = False

    def _estimate(self) -> tuple[Vector, Vector]:
        asked, proposed, accepted = self._asked, self._proposed, self._accepted
        falls = _ratio(asked.tolist(), accepted.tolist(), float(proposed[0]))
        gains, rows = [], []
        gain = row = 1.0
        for place, count in enumerate(asked.tolist()):
            guess = gain * (0.5 if place == 0 else falls)
            gain = min(gain, (float(accepted[place]) + PLACE_PRIOR * guess) / (count + PLACE_PRIOR))
            row = min(row, (float(proposed[place]) + PLACE_PRIOR * row) / (count + PLACE_PRIOR))
            gains.append(gain)
            rows.append(max(gain, row))
        return np.asarray(gains), np.asarray(rows)


def _ratio(asked: list[float], accepted: list[float], proposed: float) -> float:
    """How much rarer acceptance gets from one place to the next, over all places. Before any but
    the first was reached: the chance that a first node is accepted, as in a chain."""
    before = after = 0.0
    for place in range(1, len(asked)):
        share = asked[place] / max(asked[place - 1], 1e-9)
        before += accepted[place - 1] * min(1.0, share)
        after += accepted[place]
    first = (accepted[0] + 0.5 * PLACE_PRIOR) / (proposed + PLACE_PRIOR)
    return min(1.0, (after + 2.0 * first) / (before + 2.0))


class SequenceAcceptance:
    """Sequences against their classes. A place in the arrays belongs to one sequence."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: dict[int, int] = {}  # by handle
        self._free: list[int] = []
        self._asked = np.zeros((0, most))
        self._accepted = np.zeros(0)
        self._at = np.zeros(0)  # step of the last change

    def places(self, handles: list[int]) -> NDArray[np.int64]:
        """[B] of these sequences; the others lose theirs when they have become many."""
        if len(self._places) > 4 * len(handles) + 64:
            present = set(handles)
            for gone in [h for h in self._places if h not in present]:
                self._free.append(self._places.pop(gone))
        return np.array([self._place(handle) for handle in handles], dtype=np.int64)

    def _place(self, handle: int) -> int:
        place = self._places.get(handle)
        if place is None:
            if not self._free:
                self._grow()
            place = self._places[handle] = self._free.pop()
            self._asked[place] = 0.0
            self._accepted[place] = 0.0
        return place

    def _grow(self) -> None:
        size, more = len(self._at), max(64, len(self._at))
        self._asked = np.concatenate([self._asked, np.zeros((more, self._most))])
        self._accepted = np.append(self._accepted, np.zeros(more))
        self._at = np.append(self._at, np.zeros(more))
        self._free += range(size + more - 1, size - 1, -1)

    def observe(
        self, places: NDArray[np.int64], asked: Vector, accepted: Vector, step: int
    ) -> None:
        """Drafts of these sequences: asked [B, most] how many reached each place, accepted [B]."""
        keep = np.exp(
            -asked[:, 0] / SEQUENCE_MEMORY - (step - self._at[places]) / SEQUENCE_FORGET_STEPS
        )
        self._asked[places] = self._asked[places] * keep[:, None] + asked
        self._accepted[places] = self._accepted[places] * keep + accepted
        self._at[places] = step

    def exponents(
        self, places: NDArray[np.int64], known: AcceptanceModel, step: int
    ) -> NDArray[np.int64]:
        """[B] indices into EXPONENTS: that with which the class would expect what was accepted."""
        keep = np.exp((self._at[places] - step) / SEQUENCE_FORGET_STEPS)
        one = int(np.flatnonzero(EXPONENTS == 1.0)[0])
        prior = SEQUENCE_PRIOR * known.profile
        asked = self._asked[places] * keep[:, None] + prior
        accepted = self._accepted[places] * keep + float(prior @ known.powers[one])
        expected = asked @ known.powers.T  # [B, exponents], falling
        above = (expected > accepted[:, None] + 1e-9).sum(axis=1)
        # The nearer of the last one above and the first one not above.
        low = np.minimum(above, len(EXPONENTS) - 1)
        high = np.maximum(above - 1, 0)
        each = np.arange(len(places))
        closer = expected[each, high] - accepted < accepted - expected[each, low]
        nearest: NDArray[np.int64] = np.where(closer, high, low)
        return nearest

    def tested(self, places: NDArray[np.int64], step: int) -> Vector:
        """[B] drafts that are remembered of each."""
        keep = np.exp((self._at[places] - step) / SEQUENCE_FORGET_STEPS)
        tested: Vector = self._asked[places, 0] * keep
        return tested
