"""Simulated time: an event queue in time order; events of one time run in the order of creation."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

EventHandler = Callable[..., None]


class SimulatedClock:
    """``now`` is in seconds since the beginning.

    Events cannot be cancelled: a handler has to notice itself that it is out of date.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._due: list[tuple[float, int, EventHandler, tuple[Any, ...]]] = []

    def at(self, when: float, handler: EventHandler, *args: Any) -> None:
        """Call ``handler(*args)`` at ``when``; a time in the past is due at once."""
        assert not math.isnan(when)
        self.events += 1
        heapq.heappush(self._due, (max(when, self.now), self.events, handler, args))

    def run_before(self, until: float) -> None:
        """Run all events before ``until``, then set the clock to it."""
        due = self._due
        while due and due[0][0] < until:
            self.now, _, handler, args = heapq.heappop(due)
            handler(*args)
        self.now = max(self.now, until)

    def step(self) -> bool:
        """Run the next event; return False when there is none."""
        if not self._due:
            return False
        self.now, _, handler, args = heapq.heappop(self._due)
        handler(*args)
        return True
