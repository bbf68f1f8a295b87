"""Acceptance rates of draft nodes, learned from verified drafts. Torch-free.

For each class of requests and each place i in the order of proposing, AcceptanceModel keeps decayed
frequencies: how often an i-th node was requested, proposed and accepted. This holds for chains and
trees alike. Rates of places that were never reached are extrapolated from the places before them.

A sequence differs from its class by one exponent x: where the class has acceptance rate g, the
sequence has g^x. For a chain with acceptance a this gives acceptance a^x. SequenceAcceptance
estimates x from accepted against expected nodes, shrunk towards 1 while few drafts are known.
AcceptanceTracker owns the objects of both classes.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from protocol.performance.draft_choice import Vector

CLASS_MEMORY = 200.0  # decay constant of a class's frequencies, in drafts

CLASS_FORGET_STEPS = 512.0
"""Decay constant of a class's frequencies, in steps: recent drafts outweigh an old estimate."""

SEQUENCE_MEMORY = 16.0  # decay constant of a sequence's counts, in drafts

SEQUENCE_FORGET_STEPS = 128.0
"""Decay constant in steps: a sequence without drafts returns to the rates of its class."""

PLACE_PRIOR = 1.0
"""Weight, in drafts, of the guess for a place that is extrapolated from the place before."""

SEQUENCE_PRIOR = 3.0  # weight, in drafts, of the class's rates in the estimate for a new sequence

EXPONENTS: Vector = np.concatenate(
    [[0.0], 2.0 ** np.arange(-5.0, 3.0, 0.25), 2.0 ** np.arange(3.0, 7.1, 0.5)]
)
"""Possible exponents of a sequence, in ascending order (highest acceptance first)."""


class AcceptanceModel:
    """Acceptance and proposal rates of one class of requests, for up to ``most`` nodes."""

    def __init__(self, most: int) -> None:
        self._asked = np.zeros(most)
        self._proposed = np.zeros(most)
        self._accepted = np.zeros(most)
        self.accept_rates = np.zeros((len(EXPONENTS), most))  # of a sequence with each exponent
        self.propose_rates = np.zeros((len(EXPONENTS), most))

    @property
    def drafts(self) -> float:
        """Number of (decayed) drafts behind the frequencies."""
        return float(self._asked[0])

    @property
    def profile(self) -> Vector:
        """[most] share of the drafts that reached each place."""
        profile: Vector = self._asked / max(1e-9, float(self._asked[0]))
        return profile

    def observe(self, asked: Vector, proposed: Vector, accepted: Vector, steps: int) -> None:
        """Add the drafts of some steps, ``steps`` after the last call. asked, proposed, accepted:
        [most] drafts whose i-th node was requested, proposed, accepted."""
        keep = math.exp(-float(asked[0]) / CLASS_MEMORY - steps / CLASS_FORGET_STEPS)
        for counts, news in (
            (self._asked, asked),
            (self._proposed, proposed),
            (self._accepted, accepted),
        ):
            counts *= keep
            counts += news
        accept, propose = self._estimate()
        self.accept_rates = accept ** EXPONENTS[:, None]
        self.propose_rates = propose ** EXPONENTS[:, None]

    def _estimate(self) -> tuple[Vector, Vector]:
        asked, proposed, accepted = self._asked, self._proposed, self._accepted
        ratio = _place_ratio(asked.tolist(), accepted.tolist(), float(proposed[0]))
        accept_rates, propose_rates = [], []
        accept = propose = 1.0
        for place, count in enumerate(asked.tolist()):
            guess = accept * (0.5 if place == 0 else ratio)
            total = count + PLACE_PRIOR
            accept = min(accept, (float(accepted[place]) + PLACE_PRIOR * guess) / total)
            propose = min(propose, (float(proposed[place]) + PLACE_PRIOR * propose) / total)
            accept_rates.append(accept)
            propose_rates.append(max(accept, propose))
        return np.asarray(accept_rates), np.asarray(propose_rates)


def _place_ratio(asked: list[float], accepted: list[float], proposed: float) -> float:
    """Return the mean ratio of acceptance between consecutive places. While only the first place
    was reached, this is its acceptance rate, as in a chain."""
    before = after = 0.0
    for place in range(1, len(asked)):
        share = asked[place] / max(asked[place - 1], 1e-9)
        before += accepted[place - 1] * min(1.0, share)
        after += accepted[place]
    first = (accepted[0] + 0.5 * PLACE_PRIOR) / (proposed + PLACE_PRIOR)
    return min(1.0, (after + 2.0 * first) / (before + 2.0))


class SequenceAcceptance:
    """Acceptance of each sequence relative to its class. Each sequence owns one slot of the arrays;
    ``assign_slots`` assigns and reclaims slots."""

    def __init__(self, most: int) -> None:
        self._slots: dict[int, int] = {}  # by handle
        self._asked = np.zeros((0, most))
        self._accepted = np.zeros(0)
        self._at = np.zeros(0)  # step of the last change

    def assign_slots(self, handles: list[int]) -> NDArray[np.int64]:
        """Return the slots [B] of these sequences, until the next call. Other sequences are
        forgotten once there are many of them."""
        known = list(self._slots)
        if len(known) > 4 * len(handles) + 64:
            present = set(handles)
            known = [handle for handle in known if handle in present]
        places = [self._slots[handle] for handle in known]
        new = [handle for handle in handles if handle not in self._slots]
        if new or len(known) < len(self._slots):
            more = (0, len(new))
            self._asked = np.pad(self._asked[places], (more, (0, 0)))
            self._accepted = np.pad(self._accepted[places], more)
            self._at = np.pad(self._at[places], more)
            self._slots = {handle: slot for slot, handle in enumerate(known + new)}
        return np.array([self._slots[handle] for handle in handles], dtype=np.int64)

    def observe(self, slots: NDArray[np.int64], asked: Vector, accepted: Vector, step: int) -> None:
        """Add drafts: asked [B, most] drafts that reached each place, accepted [B] nodes."""
        keep = np.exp(-asked[:, 0] / SEQUENCE_MEMORY - self._age(slots, step))
        self._asked[slots] = self._asked[slots] * keep[:, None] + asked
        self._accepted[slots] = self._accepted[slots] * keep + accepted
        self._at[slots] = step

    def _age(self, slots: NDArray[np.int64], step: int) -> Vector:
        age: Vector = (step - self._at[slots]) / SEQUENCE_FORGET_STEPS
        return age

    def exponents(
        self, slots: NDArray[np.int64], model: AcceptanceModel, step: int
    ) -> NDArray[np.int64]:
        """Return indices [B] into EXPONENTS whose expected acceptance is nearest to the actual."""
        keep = np.exp(-self._age(slots, step))
        one = int(np.flatnonzero(EXPONENTS == 1.0)[0])
        prior = SEQUENCE_PRIOR * model.profile
        asked = self._asked[slots] * keep[:, None] + prior
        accepted = self._accepted[slots] * keep + float(prior @ model.accept_rates[one])
        expected = asked @ model.accept_rates.T  # [B, exponents], falling
        above = (expected > accepted[:, None] + 1e-9).sum(axis=1)
        # Take the nearer of the last exponent above and the first one not above.
        low = np.minimum(above, len(EXPONENTS) - 1)
        high = np.maximum(above - 1, 0)
        each = np.arange(len(slots))
        closer = expected[each, high] - accepted < accepted - expected[each, low]
        nearest: NDArray[np.int64] = np.where(closer, high, low)
        return nearest

    def remembered_drafts(self, slots: NDArray[np.int64], step: int) -> Vector:
        """Return the number [B] of (decayed) drafts of each sequence."""
        drafts: Vector = self._asked[slots, 0] * np.exp(-self._age(slots, step))
        return drafts
