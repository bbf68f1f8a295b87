"""KV that is waited for, and how fast it comes then.

Once a prompt is computed, what is left of its KV comes as fast as the link brings it: its tail. The
best of the last tails is what the link can do, where nobody has said so.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LEAST_BYTES = 64 << 10
"""Tails shorter than this measure latencies."""

LAST = 16
"""Tails whose best counts: a link that has become slower is known as such after so many."""


class Tails:
    """Of all transfers to one worker. Event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rates: deque[float] = deque(maxlen=LAST)
        self._active = 0
        self._seconds = 0.0
        self._marked = clock()

    @contextmanager
    def waiting(self, came: Callable[[], int]) -> Iterator[None]:
        """A receiver waits for nothing but KV. ``came``: bytes of it so far."""
        self._mark(1)
        began, before = self._clock(), came()
        try:
            yield
            count, seconds = came() - before, self._clock() - began
            if count >= LEAST_BYTES and seconds > 0:
                self._rates.append(count / seconds)
        finally:
            self._mark(-1)

    @property
    def seconds(self) -> float:
        """That receivers have waited so, summed up over them."""
        self._mark(0)
        return self._seconds

    @property
    def best(self) -> float | None:
        """Bytes per second; None as long as nobody has waited for enough."""
        return max(self._rates, default=None)

    def _mark(self, more: int) -> None:
        now = self._clock()
        self._seconds += self._active * (now - self._marked)
        self._marked = now
        self._active += more
