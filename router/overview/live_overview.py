"""What `/ui` shows: one look a second at most, for all who watch; none while nobody does.

asked --a look runs, or the next is not due (pace.py)--> that one
      +-else--> a look: pages, then an Overview over them and the looks before
not asked for FORGET_S --> nothing is held
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from protocol.security.tls import TlsFiles
from router.overview.metrics_pages import Group, Limits, Pages, Seen
from router.overview.overview import overview
from router.overview.rates import WINDOW_S, Past
from router.overview.watcher import Trust

# MERGED router.overview.pace
# How often is looked: a look costs CPU time of the loop that streams run on, the more the more
# processes there are.
#
# begin(at, cpu) -> end(at, cpu) -> due(at)?
#
# ``at``: seconds, monotonic; ``cpu``: CPU seconds of the thread, which serves others, too: what
# these
# used between looks, they are taken to use during them.

SHARE = 0.1
"""Of a core, for looks."""
ENOUGH_S = 0.1
"""Between looks, to say what others use."""


class Pace:
    """``at``, ``cpu``: when there was no look yet. ``least_s``: between the begins of two."""

    def __init__(self, at: float, cpu: float, least_s: float) -> None:
        self._least_s = least_s
        self._began = self._ended = (at, cpu)
        self._others = 0.0  # of a core
        self._next = at

    def begin(self, at: float, cpu: float) -> None:
        """Of a look."""
        since, used = at - self._ended[0], cpu - self._ended[1]
        if since >= ENOUGH_S:
            self._others = min(used / since, 1.0)
        self._began = (at, cpu)

    def end(self, at: float, cpu: float) -> None:
        began, cpu_then = self._began
        cost = cpu - cpu_then - self._others * (at - began)
        self._next = began + max(cost / SHARE, self._least_s)
        self._ended = (at, cpu)

    def due(self, at: float) -> bool:
        """Whether the next look may begin."""
        return at >= self._next


LOOK_S = 1.0
"""Between two looks, at least."""
FORGET_S = 2 * WINDOW_S
LIMITS = Limits(deadline_s=1.5, size=256 << 10)
"""Of one page."""


class Viewing:
    """``discover``: the groups of ``/sd``. Raises StartupError for files that cannot be used."""

    def __init__(
        self, discover: Callable[[], Awaitable[list[dict[str, Any]]]], files: TlsFiles | None
    ) -> None:
        self._discover = discover
        self._trust = None if files is None else Trust(files)
        self._past = Past()
        self._look: asyncio.Task[bytes] | None = None
        self._forget: asyncio.TimerHandle | None = None
        self._pace = Pace(time.monotonic(), time.thread_time(), LOOK_S)
        self.looks = 0

    @property
    def held(self) -> int:
        """Looks in memory."""
        return self._past.kept

    async def overview(self) -> bytes:
        """An Overview, as JSON: of the last look, or of a new one where that is due."""
        look = self._look
        if look is None or (look.done() and self._pace.due(time.monotonic())):
            look = self._look = asyncio.create_task(self._see())
        self._remember()
        return await asyncio.shield(look)  # who hangs up ends nobody else's

    async def close(self) -> None:
        """Idempotent."""
        look, self._look = self._look, None
        if look is not None:
            look.cancel()
            await asyncio.wait({look})
        if self._forget is not None:
            self._forget.cancel()

    async def _see(self) -> bytes:
        self.looks += 1
        self._pace.begin(time.monotonic(), time.thread_time())
        try:
            seen = await self._pages(msgspec.convert(await self._discover(), list[Group]))
            shown = overview("", seen, self._past.take(seen.moment), time.time())
            return msgspec.json.encode(shown)
        finally:
            self._pace.end(time.monotonic(), time.thread_time())

    async def _pages(self, groups: list[Group]) -> Seen:
        if self._trust is None:
            pages = Pages(LIMITS)
        else:
            pages = Pages(LIMITS, tls=self._trust.context(), name=self._trust.name)
        async with pages:
            return await pages.look(groups)

    def _remember(self) -> None:
        if self._forget is not None:
            self._forget.cancel()
        self._forget = asyncio.get_running_loop().call_later(FORGET_S, self._drop)

    def _drop(self) -> None:
        self._past.clear()
        self._look = None
