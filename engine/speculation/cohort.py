"""The sequences of a step, sorted into classes of requests. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.sequence import Sequence as Running
from engine.speculation.gains import Luck

Indices: TypeAlias = NDArray[np.int64]

GREEDY = 1e-5
"""Temperatures below it draw the most likely token."""

COOL = 0.7
"""Up to this temperature, most draws are still the most likely token."""


def kind_of(sequence: Running) -> int:
    """Its class: how hot it is drawn, and whether under a grammar."""
    sampling = sequence.request.sampling
    heat = sampling.temperature
    bucket = 0 if heat < GREEDY else 1 if heat <= COOL else 2
    return 2 * bucket + (sequence.grammar is not None)


@dataclass(frozen=True)
class Cohort:
    """B sequences in the order of the step."""

    last: Running
    handles: list[int]  # [B]
    places: Indices  # [B] in Luck
    members: dict[int, Indices]  # of each kind that is present: indices of its sequences

    def still(self, sequences: Sequence[Running]) -> bool:
        """Whether these are the same: new ones come at the end, so that it takes a look at the last
        one and at their number."""
        return len(sequences) == len(self.handles) and sequences[-1] is self.last


def gather(sequences: Sequence[Running], luck: Luck) -> Cohort:
    handles = [s.handle for s in sequences]
    found: dict[int, list[int]] = {}
    for index, sequence in enumerate(sequences):
        found.setdefault(kind_of(sequence), []).append(index)
    members = {kind: np.array(indices, dtype=np.int64) for kind, indices in found.items()}
    return Cohort(sequences[-1], handles, luck.places(handles), members)
