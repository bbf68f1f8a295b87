"""How many frames a transfer may have under way, and whether its sender has gone quiet.

    asked for a slot --granted--> credit with the sender --frame--> arrived

A transfer starts with few credits: until its first frame comes, its prompt may still be waiting to
be computed, and slots that it held would be missing elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable

START = 2
"""Frames under way before the first one has come."""

OPEN = 4
"""Frames under way once frames flow."""


class Window:
    """Counts of one transfer of ``total`` frames."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._asked = 0
        self._granted = 0
        self._arrived = 0
        self._moved = clock()

    def to_ask(self) -> int:
        """Slots to ask for now; they count as asked for."""
        size = OPEN if self._arrived else START
        count = min(self._total - self._asked, size - (self._asked - self._arrived))
        self._asked += count
        return count

    def granted(self) -> None:
        """The sender may send one frame more."""
        if self._granted == self._arrived:
            self._moved = self._clock()
        self._granted += 1

    def arrived(self) -> None:
        self._arrived += 1
        self._moved = self._clock()

    def stalled_s(self) -> float:
        """Seconds for which the sender has held a credit and sent nothing."""
        return 0.0 if self._granted == self._arrived else self._clock() - self._moved
