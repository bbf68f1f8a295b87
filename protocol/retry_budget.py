"""Limits how often one request is tried again, by a count that decays with time.

A lifetime count would end a long text after the third fault of an hour, although each of them was
survived. A request that itself kills what computes it does so again at once, and is ended. The
router keeps two budgets for each choice (router/generation/submission.py), and a decode worker one
for each request (decode_worker/request.py).
"""

from __future__ import annotations

from typing import NamedTuple


class RetryLimit(NamedTuple):
    """``events`` within ``window_s`` seconds end the request. So does a larger number in a longer
    time, as long as more than one comes in each ``window_s``."""

    events: int
    window_s: float


DEATH_LIMIT = RetryLimit(3, 60.0)
"""Workers and engines that may die under one request, which may be what kills them."""

HAND_BACK_LIMIT = RetryLimit(32, 60.0)
"""Times that workers may hand one request back unharmed, which is nobody's fault."""


class RetryBudget:
    """Events of one kind in the life of one request: a leaky bucket.

        level --record--> level + 1         level --each second--> level - 1 / window_s, at least 0

    It is used up when the level exceeds ``events - 1``: ``events`` within ``window_s`` have lost
    less than one by then. Times are seconds of one clock of the caller."""

    def __init__(self, limit: RetryLimit, level: float = 0.0, at_s: float | None = None) -> None:
        """``level``: what another process has counted of the same request by ``at_s``; None: by the
        first call."""
        self._limit = limit
        self._level = min(level, float(limit.events))
        self._at_s = at_s  # when ``_level`` was right; None: not asked for yet

    def record(self, now_s: float, count: int = 1) -> None:
        """Count events that have just happened; what a peer reports may be any number."""
        self._level = min(self.level(now_s) + count, float(self._limit.events))
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """Return the events counted, less those that have decayed."""
        if self._at_s is None:
            self._at_s = now_s
        return max(0.0, self._level - (now_s - self._at_s) / self._limit.window_s)

    def count(self, now_s: float) -> int:
        """Return the level as a whole number, rounded, for another process."""
        return round(self.level(now_s))

    def used_up(self, now_s: float) -> bool:
        """Return whether the request must not be tried again."""
        return self.level(now_s) > self._limit.events - 1
