"""Links between simulated workers.

A worker sends and receives over one network card, and the transfers at either end share it evenly.
The share of a transfer is computed when it begins and then every second, that of a request's KV for
what goes while the prompt is computed and again for the rest once it is. It is not computed anew
whenever another transfer begins or ends.
"""

from __future__ import annotations

import math
from collections import Counter

_SLICE_S = 1.0
"""Seconds after which a long transfer computes its share of the link anew."""


class SimulatedNetwork:
    """``rates``: bytes/s of each worker's card, by the worker's number; 0 means unlimited."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}
        self._out: Counter[int] = Counter()
        self._in: Counter[int] = Counter()

    def rate(self, source: int, target: int) -> float:
        """Return the bytes/s of one of the open transfers between two workers."""
        out = self._card_rate(source) / max(1, self._out[source])
        return min(out, self._card_rate(target) / max(1, self._in[target]))

    def _card_rate(self, number: int) -> float:
        return self.rates.get(number, 0.0) or math.inf

    def next_slice(self, source: int, target: int, left: float) -> tuple[float, float]:
        """Return the seconds until an open transfer of ``left`` bytes computes its share anew or
        ends, and the bytes that it has sent by then."""
        rate = self.rate(source, target)
        if left > rate * _SLICE_S:
            return _SLICE_S, rate * _SLICE_S
        return left / rate, left

    def open(self, source: int, target: int) -> None:
        self._out[source] += 1
        self._in[target] += 1

    def close(self, source: int, target: int) -> None:
        self._out[source] -= 1
        self._in[target] -= 1
