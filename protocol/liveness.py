"""Who still lives: silence as others notice it, and how often a request may be hit.

Silence is counted in looks, not on a clock: a process that stood still itself (stopped, swapped
out) would otherwise take everybody else for dead the moment it goes on.
"""

from __future__ import annotations

import asyncio

ALIVE_S = 1.0
"""A worker that holds an open call says something at least so often."""

SILENCE_S = 3.0
"""A worker that says nothing for so long stands still: its work is done elsewhere."""

MAX_DEATHS = 3
"""Workers or engines that may die under one request: it may be what kills them."""

_LOOK_S = 0.25


class Silence:
    """``heard`` whenever the other end was; ``lasts`` notices when it no longer is."""

    def __init__(self) -> None:
        self._looks = 0

    def heard(self) -> None:
        self._looks = 0

    async def lasts(self, limit_s: float) -> None:
        """Returns when nothing was heard for ``limit_s`` of this process's own running time."""
        while self._looks * _LOOK_S < limit_s:
            await asyncio.sleep(_LOOK_S)
            self._looks += 1
