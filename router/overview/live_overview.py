"""The overview that ``/ui`` shows: one scrape per second at most for all clients, none without any.

overview() --a scrape runs, or the next is not due (ScrapePacer)--> that scrape's result
           +-else--> a new scrape; the overview compares it with the earlier ones
no call for FORGET_S --> all scrapes are dropped
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from protocol.security.tls import TlsFiles
from router.overview.cluster_scraper import MetricsTls
from router.overview.overview import cluster_overview
from router.overview.rates import WINDOW_S, ScrapeHistory
from router.overview.scraper import MetricsScraper, ScrapeLimits, ScrapeResult, TargetGroup

SCRAPE_INTERVAL_S = 1.0
FORGET_S = 2 * WINDOW_S
LIVE_LIMITS = ScrapeLimits(deadline_s=1.5, size=256 << 10)

CPU_SHARE = 0.1
"""Share of a core that scrapes may use."""
MIN_SAMPLE_S = 0.1
"""Least time between two scrapes from which the CPU use of other work is estimated."""


class LiveOverview:
    """The overview of one router, created and closed with it.

    ``discover`` returns the groups of ``/sd``. Raises StartupError for unusable ``files``.
    """

    def __init__(
        self, discover: Callable[[], Awaitable[list[dict[str, Any]]]], files: TlsFiles | None
    ) -> None:
        self._discover = discover
        self._tls = None if files is None else MetricsTls(files)
        self._history = ScrapeHistory()
        self._scrape: asyncio.Task[bytes] | None = None
        self._forget: asyncio.TimerHandle | None = None
        self._pacer = ScrapePacer(time.monotonic(), time.thread_time(), SCRAPE_INTERVAL_S)
        self.scrapes = 0

    @property
    def history_length(self) -> int:
        return len(self._history)

    async def overview(self) -> bytes:
        """Return a ClusterOverview as JSON: of the last scrape, or of a new one where it is due."""
        scrape = self._scrape
        if scrape is None or (scrape.done() and self._pacer.due(time.monotonic())):
            scrape = self._scrape = asyncio.create_task(self._new_overview())
        self._restart_forget_timer()
        return await asyncio.shield(scrape)  # a client that disconnects must not cancel it

    async def close(self) -> None:
        """Cancel the scrape; idempotent."""
        scrape, self._scrape = self._scrape, None
        if scrape is not None:
            scrape.cancel()
            await asyncio.wait({scrape})
        if self._forget is not None:
            self._forget.cancel()

    async def _new_overview(self) -> bytes:
        self.scrapes += 1
        self._pacer.begin(time.monotonic(), time.thread_time())
        try:
            groups = msgspec.convert(await self._discover(), list[TargetGroup])
            result = await self._fetch_pages(groups)
            before = self._history.add(result.snapshot)
            return msgspec.json.encode(cluster_overview("", result, before, time.time()))
        finally:
            self._pacer.end(time.monotonic(), time.thread_time())

    async def _fetch_pages(self, groups: list[TargetGroup]) -> ScrapeResult:
        if self._tls is None:
            scraper = MetricsScraper(LIVE_LIMITS)
        else:
            scraper = MetricsScraper(LIVE_LIMITS, tls=self._tls.context(), name=self._tls.name)
        async with scraper:
            return await scraper.scrape(groups)

    def _restart_forget_timer(self) -> None:
        if self._forget is not None:
            self._forget.cancel()
        self._forget = asyncio.get_running_loop().call_later(FORGET_S, self._drop)

    def _drop(self) -> None:
        self._history.clear()
        self._scrape = None


class ScrapePacer:
    """Bounds the CPU share of scrapes, which run on the event loop of the streams.

        begin(at, cpu) -> end(at, cpu) -> due(at)?

    ``at`` is monotonic seconds; ``cpu`` is CPU seconds of the thread, which does other work, too.
    That other work is assumed to use as much CPU during a scrape as it did between scrapes.
    ``min_interval_s``: between the begins of two scrapes.
    """

    def __init__(self, at: float, cpu: float, min_interval_s: float) -> None:
        self._min_interval_s = min_interval_s
        self._began = self._ended = (at, cpu)
        self._others = 0.0  # share of a core used by other work
        self._next = at

    def begin(self, at: float, cpu: float) -> None:
        since, used = at - self._ended[0], cpu - self._ended[1]
        if since >= MIN_SAMPLE_S:
            self._others = min(used / since, 1.0)
        self._began = (at, cpu)

    def end(self, at: float, cpu: float) -> None:
        began, cpu_then = self._began
        cost = cpu - cpu_then - self._others * (at - began)
        self._next = began + max(cost / CPU_SHARE, self._min_interval_s)
        self._ended = (at, cpu)

    def due(self, at: float) -> bool:
        """Return whether the next scrape may begin."""
        return at >= self._next
