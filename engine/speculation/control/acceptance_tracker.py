"""Acceptance statistics of the decoding sequences and of their classes. Torch-free.

The Controller owns one AcceptanceTracker, feeds it step outcomes and reads expected gains from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.scheduling.sequence import Sequence as Running
from engine.speculation.control.acceptance import AcceptanceModel, SequenceAcceptance
from engine.speculation.control.draft_lengths import StepOutcome, count_drafts
from protocol.performance.draft_choice import Vector

Indices: TypeAlias = NDArray[np.int64]

GREEDY = 1e-5  # temperatures below it draw the most likely token
COOL = 0.7  # up to this temperature, most draws are still the most likely token
MIN_DRAFTS = 3.0  # drafts of a class or a sequence below which its acceptance counts as unknown


def request_class(sequence: Running) -> int:
    """Return the class of a request: three temperature ranges, each with or without a grammar."""
    temperature = sequence.request.sampling.temperature
    bucket = 0 if temperature < GREEDY else 1 if temperature <= COOL else 2
    return 2 * bucket + (sequence.grammar is not None)


@dataclass(frozen=True)
class BatchGroup:
    """The B sequences of a step in batch order, grouped by request class."""

    last: Running
    handles: list[int]  # [B]
    slots: Indices  # [B] in SequenceAcceptance
    members: dict[int, Indices]  # request class -> batch indices of its sequences

    def matches(self, sequences: Sequence[Running]) -> bool:
        """Return whether ``sequences`` is the same batch. New sequences join at the end, so
        comparing the last one and the length is enough."""
        return len(sequences) == len(self.handles) and sequences[-1] is self.last


def group_batch(sequences: Sequence[Running], acceptance: SequenceAcceptance) -> BatchGroup:
    """Group the sequences of a step by request class and assign their acceptance slots."""
    handles = [s.handle for s in sequences]
    found: dict[int, list[int]] = {}
    for index, sequence in enumerate(sequences):
        found.setdefault(request_class(sequence), []).append(index)
    members = {key: np.array(indices, dtype=np.int64) for key, indices in found.items()}
    return BatchGroup(sequences[-1], handles, acceptance.assign_slots(handles), members)


class AcceptanceTracker:
    """Acceptance estimates of one engine's sequences and request classes. Outcomes of steps over
    the same batch are buffered and learned together, when the next decision asks for the batch."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._models = defaultdict[int, AcceptanceModel](lambda: AcceptanceModel(most))
        self._learned_at: dict[int, int] = {}  # by class: the step of its last update
        self._sequences = SequenceAcceptance(most)
        self._outcomes: list[StepOutcome] = []  # of ``batch``, not yet learned
        self.batch: BatchGroup | None = None  # of the last decision

    def group(self, decoding: Sequence[Running], step: int) -> BatchGroup:
        """Return the batch group of ``decoding``; learn the outcomes buffered before ``step``."""
        self._learn(step)
        batch = self.batch
        if batch is None or not batch.matches(decoding):
            batch = self.batch = group_batch(decoding, self._sequences)
        return batch

    def observe(self, outcome: StepOutcome) -> None:
        """Buffer the outcome of a step that requested drafts, if it ran over ``batch``."""
        if self.batch is not None and self.batch.matches(outcome.sequences):
            self._outcomes.append(outcome)

    def _learn(self, step: int) -> None:
        batch = self.batch
        if batch is None or not self._outcomes:
            return
        asked, proposed, accepted = count_drafts(self._outcomes, self._most)
        self._outcomes = []
        self._sequences.observe(batch.slots, asked, accepted.sum(axis=1), step)
        for key, members in batch.members.items():
            news = [x[members].sum(axis=0) for x in (asked, proposed, accepted)]
            steps = step - self._learned_at.get(key, step)
            self._models[key].observe(news[0], news[1], news[2], steps)
            self._learned_at[key] = step

    def is_unknown(self, key: int) -> bool:
        """Return whether there are too few drafts of this request class."""
        return self._models[key].drafts < MIN_DRAFTS

    def expected(self, batch: BatchGroup, step: int) -> tuple[Vector, Vector]:
        """Return acceptance and proposal rates [B, most] of all nodes; 0 and 1 if unknown."""
        gains = np.zeros((len(batch.handles), self._most))
        rows = np.ones_like(gains)
        for key, members in batch.members.items():
            if not self.is_unknown(key):
                model = self._models[key]
                exponents = self._sequences.exponents(batch.slots[members], model, step)
                gains[members] = model.accept_rates[exponents]
                rows[members] = model.propose_rates[exponents]
        return gains, rows

    def variance(self, batch: BatchGroup, mean: float) -> float:
        """Return the variance of the expected accepted tokens, due to the number of drafts seen.
        ``mean`` is the expectation for each sequence. The accepted length of a chain is about
        geometrically distributed; with mean E, its variance is E (1 + E)."""
        known = (k for k in batch.members if not self.is_unknown(k))
        shares = (len(batch.members[k]) ** 2 / self._models[k].drafts for k in known)
        return mean * (1.0 + mean) * sum(shares)

    def least_tested(self, batch: BatchGroup, indices: Indices, step: int) -> Indices:
        """Sort batch ``indices`` by exploration order: first sequences with few drafts, then new.
        Sequences that have begun come first because a proposer may need several steps to catch up
        with a text before it can propose."""
        tested = self._sequences.remembered_drafts(batch.slots[indices], step)
        rank = np.where((tested > 0.1) & (tested < MIN_DRAFTS), -1.0, tested)
        return indices[np.argsort(rank, kind="stable")]
