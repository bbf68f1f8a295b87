"""Limits and a detector for workers and engines that have died or hang.

Silence is counted in checks instead of on a clock: a process that was itself stopped or swapped out
would otherwise take all its peers for dead the moment it goes on.
"""

from __future__ import annotations

import asyncio

ALIVE_S = 1.0
"""A worker that holds an open call sends something at least so often."""

SILENCE_S = 3.0
"""A worker that sends nothing for so long counts as hung, and its work is done elsewhere."""

MAX_DEATHS = 3
"""Workers or engines that may die under one request, which may be what kills them."""

_CHECK_S = 0.25


class SilenceDetector:
    """Notices when a peer falls silent. Its reader calls ``heard`` for everything that comes."""

    def __init__(self) -> None:
        self._silent_checks = 0

    def heard(self) -> None:
        self._silent_checks = 0

    async def wait_for_silence(self, limit_s: float) -> None:
        """Return when nothing was heard for ``limit_s`` of this process's own running time."""
        while self._silent_checks * _CHECK_S < limit_s:
            await asyncio.sleep(_CHECK_S)
            self._silent_checks += 1
