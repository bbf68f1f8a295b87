"""Measures the steps in which an engine loads, for the line of a worker that is ready."""

from __future__ import annotations

import time
from collections.abc import Callable

_MIN_S = 0.3
"""Shorter steps are not reported."""


class LoadingTimes:
    """Seconds of the steps of one start. The worker calls ``begin`` for every progress report."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._step, self._began = "starting the engine", clock()

    def begin(self, step: str) -> None:
        """End the current step. Does nothing if ``step`` is the current one."""
        if step != self._step:
            now = self._clock()
            self._seconds[self._step] = self._seconds.get(self._step, 0.0) + now - self._began
            self._step, self._began = step, now

    def text(self) -> str:
        """End the last step; return the longer steps with their seconds, or an empty text."""
        self.begin("")
        shown = [f"{step} {s:.1f} s" for step, s in self._seconds.items() if s >= _MIN_S]
        return f" ({', '.join(shown)})" if shown else ""
