"""What is known of the sequences that decode: of each, and of the classes of their requests.
Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.scheduling.sequence import Sequence as Running
from engine.speculation.control.acceptance import AcceptanceModel, SequenceAcceptance
from engine.speculation.control.draft_choice import Vector
from engine.speculation.control.draft_lengths import AcceptanceSamples, StepOutcome

# MERGED engine.speculation.cohort
# The sequences of a step, sorted into classes of requests. Torch-free.

Indices: TypeAlias = NDArray[np.int64]

GREEDY = 1e-5
"""Temperatures below it draw the most likely token."""

COOL = 0.7
"""Up to this temperature, most draws are still the most likely token."""


def request_class(sequence: Running) -> int:
    """Its class: how hot it is drawn, and whether under a grammar."""
    sampling = sequence.request.sampling
    heat = sampling.temperature
    bucket = 0 if heat < GREEDY else 1 if heat <= COOL else 2
    return 2 * bucket + (sequence.grammar is not None)


@dataclass(frozen=True)
class BatchGroup:
    """B sequences in the order of the step."""

    last: Running
    handles: list[int]  # [B]
    places: Indices  # [B] in Luck
    members: dict[int, Indices]  # of each kind that is present: indices of its sequences

    def still(self, sequences: Sequence[Running]) -> bool:
        """Whether these are the same: new ones come at the end, so that it takes a look at the last
        one and at their number."""
        return len(sequences) == len(self.handles) and sequences[-1] is self.last


def group_batch(sequences: Sequence[Running], luck: SequenceAcceptance) -> BatchGroup:
    handles = [s.handle for s in sequences]
    found: dict[int, list[int]] = {}
    for index, sequence in enumerate(sequences):
        found.setdefault(request_class(sequence), []).append(index)
    members = {kind: np.array(indices, dtype=np.int64) for kind, indices in found.items()}
    return BatchGroup(sequences[-1], handles, luck.places(handles), members)


MIN_DRAFTS = 3.0
"""Drafts of a class, or of a sequence, before which nothing is said of it."""


class AcceptanceTracker:
    """Learns in portions: steps over the same cohort are kept as evidence until somebody asks."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kinds: dict[int, AcceptanceModel] = {}
        self._seen: dict[int, int] = {}  # by kind: the step up to which it has learned
        self._luck = SequenceAcceptance(most)
        self._evidence = AcceptanceSamples(most)  # of the cohort
        self.cohort: BatchGroup | None = None  # who was asked about last

    def about(self, decoding: Sequence[Running], step: int) -> BatchGroup:
        """The cohort of these, and everything learned that was seen before ``step``."""
        self._learn(step)
        cohort = self.cohort
        if cohort is None or not cohort.still(decoding):
            cohort = self.cohort = group_batch(decoding, self._luck)
        return cohort

    def see(self, outcome: StepOutcome) -> None:
        """A step for which nodes were asked, of the cohort."""
        if self.cohort is not None and self.cohort.still(outcome.sequences):
            self._evidence.add(outcome)

    def _learn(self, step: int) -> None:
        cohort = self.cohort
        if cohort is None or not self._evidence:
            return
        asked, proposed, accepted = self._evidence.take()
        self._luck.observe(cohort.places, asked, accepted.sum(axis=1), step)
        for key, members in cohort.members.items():
            news = [x[members].sum(axis=0) for x in (asked, proposed, accepted)]
            steps = step - self._seen.get(key, step)
            self._kind(key).observe(news[0], news[1], news[2], steps)
            self._seen[key] = step

    def _kind(self, key: int) -> AcceptanceModel:
        if key not in self._kinds:
            self._kinds[key] = AcceptanceModel(self._most)
        return self._kinds[key]

    def unknown(self, key: int) -> bool:
        """Whether too little is known of this class of requests."""
        return self._kind(key).drafts < MIN_DRAFTS

    def expected(self, cohort: BatchGroup, step: int) -> tuple[Vector, Vector]:
        """[B, most] each: gains and rows of every node; nothing of a class that is not known."""
        gains = np.zeros((len(cohort.handles), self._most))
        rows = np.ones_like(gains)
        for key, members in cohort.members.items():
            if not self.unknown(key):
                known = self._kind(key)
                known.refresh()
                exponents = self._luck.exponents(cohort.places[members], known, step)
                gains[members] = known.powers[exponents]
                rows[members] = known.rows[exponents]
        return gains, rows

    def variance(self, cohort: BatchGroup, mean: float) -> float:
        """Of the tokens expected to be accepted, ``mean`` of each sequence, because the frequencies
        rest on so many drafts only. How many of a chain are accepted is as good as geometrically
        distributed: of mean E, its variance is E (1 + E)."""
        known = (k for k in cohort.members if not self.unknown(k))
        shares = (len(cohort.members[k]) ** 2 / self._kind(k).drafts for k in known)
        return mean * (1.0 + mean) * sum(shares)

    def least_tested(self, cohort: BatchGroup, indices: Indices, step: int) -> Indices:
        """Those that have been begun with first, then the new ones: a proposer may have to catch up
        with a text before it can propose."""
        tested = self._luck.tested(cohort.places[indices], step)
        rank = np.where((tested > 0.1) & (tested < MIN_DRAFTS), -1.0, tested)
        return indices[np.argsort(rank, kind="stable")]
