"""Links between workers. A worker sends, and receives, over one card: what is under way at either
end shares it evenly.

The share of a transfer is taken for what goes while the prompt is computed, again for the rest once
it is, and then every second; not whenever another one begins or ends.
"""

from __future__ import annotations

import math
from collections import Counter


class Network:
    """``rates``: bytes/s of a worker's card, by its number; 0: without bound."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}
        self.active: Counter[tuple[str, str]] = Counter()  # as a router counts them
        self._out: Counter[int] = Counter()
        self._in: Counter[int] = Counter()

    def rate(self, source: int, target: int) -> float:
        """Bytes/s of a transfer that is among those under way."""
        out = self._speed(source) / max(1, self._out[source])
        return min(out, self._speed(target) / max(1, self._in[target]))

    def _speed(self, number: int) -> float:
        return self.rates.get(number, 0.0) or math.inf

    def open(self, source: int, target: int) -> None:
        self._out[source] += 1
        self._in[target] += 1

    def close(self, source: int, target: int) -> None:
        self._out[source] -= 1
        self._in[target] -= 1

    @property
    def open_ends(self) -> int:
        """Of transfers under way, for checks."""
        return self._out.total() + self._in.total()

    def receiving(self, link: tuple[str, str], count: int) -> None:
        """A hand-over began (1) or ended (-1), as a router sees it: from the first token to the
        second."""
        self.active[link] += count
        if not self.active[link]:
            del self.active[link]
