"""The arrivals of the last hour, as if the load had always been what it is now. Pure."""

from __future__ import annotations

import itertools
from collections import deque

import numpy as np

from cluster.sizing.burstiness import LOCAL_S, LONGEST_S, levelled
from cluster.sizing.queueing import SampleVector
from cluster.sizing.snapshot import Arrivals

HISTORY_S = 3600.0
"""Seconds of which arrivals are remembered."""
LASTING_S = 2.0 * LONGEST_S
"""A load that lasts for less is a burst of the load before it. The times of changes are known to
within a factor of two, so that it is longer than the longest bursts."""


class ArrivalHistory:
    """Counts of the requests that arrived in successive intervals, and changes of the load.

    Pools have room for bursts, and they follow a load that stays. A change to such a load would
    look like a burst in a history with both, and pools would have room for it twice. So what was
    before a change is shown at the level after it.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._counts: deque[float] = deque(maxlen=round(HISTORY_S / interval_s))  # the latest last
        self._changes: list[int] = []  # counts since each change, the oldest first

    def add(self, arrivals: float) -> None:
        """Append the requests of one more interval."""
        self._counts.append(round(arrivals))
        self._changes = [n + 1 for n in self._changes if n + 1 < len(self._counts)]

    def record_change(self, recent: int) -> None:
        """Note that the load of the last ``recent`` intervals differs from that before."""
        least = recent + LASTING_S / self._interval_s
        self._changes = [*(n for n in self._changes if n >= least), recent]

    def clear(self) -> None:
        """Forget all intervals."""
        self._counts.clear()
        self._changes = []

    def arrivals(self, interval_s: float) -> Arrivals:
        """Return the history at the level of now. ``interval_s``: measured seconds of an
        interval."""
        counts = np.array(self._counts, dtype=np.float64)
        shown = self._at_present_level(counts) if self._changes else counts
        return Arrivals(interval_s, tuple(shown.tolist()))

    def _at_present_level(self, counts: SampleVector) -> SampleVector:
        """Return the counts since the last change, and before them those of other loads at the
        level of now. Of a time without requests, nothing is known."""
        starts = [max(0, len(counts) - n) for n in self._changes]
        present = counts[starts[-1] :]
        local = max(1, round(LOCAL_S / self._interval_s))
        now = float(present[-local:].mean())
        if now <= 0:
            return present
        parts = (counts[a:b] for a, b in itertools.pairwise((0, *starts)))
        ended = (_until_change(part, local, now) for part in parts if part.any())
        before = (levelled(part, now, self._interval_s) for part in ended if part.any())
        return np.concatenate((*before, present))


def _until_change(part: SampleVector, local: int, after: float) -> SampleVector:
    """Return what is before the last values that are nearer to the mean after a change than the
    mean of the ``local`` last ones is: those of the change itself, whose time is not known
    exactly."""
    distance = abs(float(part[-local:].mean()) - after)
    alike = np.flatnonzero(np.abs(part - after) >= distance)
    return part[: int(alike[-1]) + 1] if len(alike) else part[:0]
