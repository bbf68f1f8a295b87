"""The arrivals of the last hour, as if the load had always been what it is now. Pure."""

from __future__ import annotations

import math
from collections import deque

from cluster.sizing.burstiness import LOCAL_S, LONGEST_S
from cluster.sizing.snapshot import Arrivals

HISTORY_S = 3600.0
"""Seconds of which arrivals are remembered."""
SETTLED_S = 2.0 * LONGEST_S
"""A load that has lasted for so long since a change is no burst. The end of a burst is seen late,
so that it has to be longer than the longest of them."""


class ArrivalHistory:
    """Counts of the requests that arrived in successive intervals.

    Pools have room for bursts, and they follow a load that stays. A change to such a load would
    look like a burst in a history with both, and pools would have room for it twice. So what was
    before a change counts as if it had been at the level after it. Once that level has lasted
    SETTLED_S, the history is kept like this. If there is another change before, the first one was a
    burst, and remains one.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._counts: deque[float] = deque(maxlen=round(HISTORY_S / interval_s))  # the latest last
        self._unsettled = 0  # of these, the latest since the load left a level that had lasted
        self._changed = 0  # of these, the latest since the last change; 0: the level has lasted

    def add(self, arrivals: float) -> None:
        """Append the requests of one more interval."""
        self._counts.append(round(arrivals))
        if not self._changed:
            return
        self._unsettled, self._changed = self._unsettled + 1, self._changed + 1
        if self._changed * self._interval_s >= SETTLED_S:
            levelled = self._levelled()
            self._counts.clear()
            self._counts.extend(levelled)
            self._unsettled = self._changed = 0

    def record_change(self, recent: int) -> None:
        """Note that the load of the last ``recent`` intervals differs from that before."""
        self._unsettled, self._changed = max(recent, self._unsettled), recent

    def clear(self) -> None:
        """Forget all intervals."""
        self._counts.clear()
        self._unsettled = self._changed = 0

    def arrivals(self, interval_s: float) -> Arrivals:
        """Return the history at the level of now. ``interval_s``: measured seconds of an
        interval."""
        return Arrivals(interval_s, tuple(self._levelled() if self._changed else self._counts))

    def _levelled(self) -> list[float]:
        """Return the counts, with those of the level that had lasted scaled to the one after the
        last change: deviations from the mean by its root, as those of a sum of independent users.
        Nothing is known of bursts beside a level of no requests."""
        counts = list(self._counts)
        before, since = counts[: -self._unsettled], counts[-self._unsettled :]
        if not before:
            return counts
        latest, local = counts[-self._changed :], before[-round(LOCAL_S / self._interval_s) :]
        was, now = math.fsum(local) / len(local), math.fsum(latest) / len(latest)
        if was <= 0 or now <= 0:
            return latest
        return [*(max(0.0, now + (n - was) * math.sqrt(now / was)) for n in before), *since]
