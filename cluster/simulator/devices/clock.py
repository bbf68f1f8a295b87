"""Simulated time: events in its order, those of one moment in the order in which they were made."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

Act = Callable[..., None]


class Clock:
    """``now`` in seconds since the beginning. An event that no longer matters has to notice that
    itself: none is taken back."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._due: list[tuple[float, int, Act, tuple[Any, ...]]] = []

    def at(self, when: float, act: Act, *args: Any) -> None:
        """Call ``act`` with ``args`` then; what lies in the past is due at once."""
        assert not math.isnan(when)
        self.events += 1
        heapq.heappush(self._due, (max(when, self.now), self.events, act, args))

    @property
    def next(self) -> float:
        """When the next event is due; infinite when there is none."""
        return self._due[0][0] if self._due else math.inf

    def run_before(self, until: float) -> None:
        """All events before ``until``, which is now then."""
        due = self._due
        while due and due[0][0] < until:
            self.now, _, act, args = heapq.heappop(due)
            act(*args)
        self.now = max(self.now, until)

    def step(self) -> bool:
        """The next event; False when there is none."""
        if not self._due:
            return False
        self.now, _, act, args = heapq.heappop(self._due)
        act(*args)
        return True
