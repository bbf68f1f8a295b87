"""Who may have a grammar tried out now: so many at once, and of each tenant one.

Those who wait go in order, but for tenants that have one at work: nobody waits behind another's
flood for longer than what is at work already.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Lanes:
    """``width``: how many at once."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._busy: set[str] = set()
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    async def enter(self, tenant: str, seconds: float) -> None:
        """``leave`` once for each. Raises TimeoutError."""
        if self._open(tenant):
            self._busy.add(tenant)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((tenant, turn))
        try:
            await asyncio.wait([turn], timeout=seconds)
        except asyncio.CancelledError:
            if turn.done():
                self.leave(tenant)
            turn.cancel()
            raise
        if not turn.done():
            turn.cancel()
            raise TimeoutError

    def leave(self, tenant: str) -> None:
        self._busy.remove(tenant)
        still = [(name, turn) for name, turn in self._waiting if not turn.done()]
        self._waiting.clear()
        for name, turn in still:
            if self._open(name):
                self._busy.add(name)
                turn.set_result(None)
            else:
                self._waiting.append((name, turn))

    def _open(self, tenant: str) -> bool:
        return len(self._busy) < self._width and tenant not in self._busy
