"""Limits and a detector for workers and engines that have died or hang.

Silence is counted in checks instead of on a clock: a process that was itself stopped or swapped out
would otherwise take all its peers for dead the moment it goes on.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

ALIVE_S = 1.0
"""A worker that holds an open call sends something at least so often."""

SILENCE_S = 3.0
"""A worker that sends nothing for so long counts as hung, and its work is done elsewhere."""

PAUSE_S = 1.0
"""A process whose check comes so much late was stopped, swapped out, or busy in one call."""

PAUSE_EFFECT_S = 2.5
"""How long a pause goes on to have effects after its end: connections that peers have closed in
the meantime, and time-outs of this process's own that fall due all at once. Less than SILENCE_S: a
peer that is silent for so long after the pause is silent itself."""

_CHECK_S = 0.25


class SilenceDetector:
    """Notices when a peer falls silent, and when this process itself stood still.

    Its reader calls ``heard`` for everything that comes. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._silent_checks = 0
        self._due_s = math.inf  # when the next check is due
        self._resumed_s = -math.inf  # end of the last pause of this process

    def heard(self) -> None:
        self._silent_checks = 0

    async def wait_for_silence(self, limit_s: float) -> None:
        """Return when nothing was heard for ``limit_s`` of this process's own running time."""
        while self._silent_checks * _CHECK_S < limit_s:
            self._due_s = self._clock() + _CHECK_S
            await asyncio.sleep(_CHECK_S)
            self._note_pause()
            self._silent_checks += 1

    def after_own_pause(self) -> bool:
        """Return whether this process stood still lately, while ``wait_for_silence`` runs.

        What breaks then says nothing about the peer: it has waited for this process in vain. Right
        also before the first check after the pause."""
        self._note_pause()
        return self._clock() - self._resumed_s < PAUSE_EFFECT_S

    def _note_pause(self) -> None:
        now = self._clock()
        if now - self._due_s > PAUSE_S:
            self._resumed_s = now
