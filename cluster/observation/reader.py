"""One look a turn: who is there, from the directory; what is asked, from routers or a Prometheus.

Whatever fails, a Reading comes of it, within a few seconds: without a mix where the directory or
the metrics cannot be had, or are old, and with all else as last known.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Self

import redis.asyncio as redis
from msgspec.structs import replace
from redis.exceptions import RedisError

from cluster.observation import workers
from cluster.observation.prometheus_api import PrometheusApi, checked
from cluster.observation.reading import Look, Reading, RequestCounts
from cluster.observation.router_pages import Scraper
from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.sizing.snapshot import Machine, Mix, Observed, Worker
from protocol.errors import Unavailable
from protocol.registry.directory import Directory, RouterRecord, WorkerRecord
from protocol.roles import Role

log = logging.getLogger("baton.autoscaler")

DIRECTORY_S = 2.0
MOST_WORKERS = 4096
FORGET_S = 600.0
"""A worker that is back after this is a new one; a directory that was emptied fills up before."""


def opened(settings: AutoscalerSettings, client: redis.Redis) -> Reader:
    """To be entered with ``async with``. Raises StartupError for a URL of Prometheus, or TLS files,
    that cannot be used."""
    window = {"interval_s": settings.interval_s, "window_s": settings.window_s}
    counts: RequestCounts
    if settings.prometheus_url is not None:
        counts = PrometheusApi(checked(settings.prometheus_url), settings.cluster, **window)
    else:
        counts = Scraper(settings.cluster, settings.tls, **window)
    directory = Directory(client, settings.cluster)
    return Reader(directory, counts, warm_up_s=settings.warm_up_s)


class Reader:
    """``clock``: monotonic. Workers that are there at the first look are warm."""

    def __init__(
        self,
        directory: Directory,
        counts: RequestCounts,
        *,
        warm_up_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._counts = directory, counts
        self._warm_up_s, self._clock = warm_up_s, clock
        self._look: Look | None = None
        self._workers: tuple[Worker, ...] = ()
        self._machines: dict[Role, Machine] = {}
        self._since: dict[str, tuple[float, float]] = {}  # by instance: first and last seen
        self._began = False
        self._listed_s = clock()  # when the directory last had a worker
        self._said = ""

    async def __aenter__(self) -> Self:
        await self._counts.__aenter__()
        return self

    async def __aexit__(self, *gone: object) -> None:
        await self._counts.__aexit__(*gone)

    async def read(self) -> Reading:
        at_s = self._clock()
        try:
            async with asyncio.timeout(DIRECTORY_S):
                records = await self._directory.workers()
                routers = await self._directory.routers.all()
        except (RedisError, OSError, TimeoutError):
            return self._reading(at_s, None, "Redis does not answer")
        if len(records) > MOST_WORKERS:
            return self._reading(at_s, None, f"the directory lists {len(records)} workers")
        emptied = not records and at_s - self._listed_s <= self._counts.stale_s
        if not emptied:
            self._take(records, at_s)
        why = await self._count(routers)
        look = self._look
        if look is None or self._clock() - look.at_s > self._counts.stale_s:
            return self._reading(at_s, None, why or "metrics are old")
        if emptied:
            return self._reading(at_s, None, "the directory was emptied, or all workers are gone")
        mix = replace(
            look.mix,
            pace=workers.typical_pace(records),
            backlog_tokens=workers.backlog_tokens(records),
            residents=workers.residents(records),
        )
        return self._reading(at_s, mix, "")

    async def _count(self, routers: list[RouterRecord]) -> str:
        """Why there is no new look; empty: there is one."""
        try:
            self._look = await self._counts.look(routers)
        except Unavailable as error:
            return str(error)
        return ""

    def _take(self, records: list[WorkerRecord], at_s: float) -> None:
        for record in records:
            first = at_s if self._began else at_s - self._warm_up_s
            first, _ = self._since.get(record.instance, (first, at_s))
            self._since[record.instance] = first, at_s
        self._began = True
        self._since = {i: s for i, s in self._since.items() if at_s - s[1] < FORGET_S}
        if records:
            self._listed_s = at_s
        self._workers = tuple(workers.worker(r, young=self._is_young(r, at_s)) for r in records)
        self._machines |= workers.machines(records)

    def _is_young(self, record: WorkerRecord, at_s: float) -> bool:
        return at_s - self._since[record.instance][0] < self._warm_up_s

    def _reading(self, at_s: float, mix: Mix | None, why: str) -> Reading:
        if why != self._said and why:
            log.warning("the pools stay as they are: %s", why)
        self._said = why
        look = self._look
        return Reading(
            at_s=at_s,
            mix=mix,
            observed=look.observed if look is not None else Observed(),
            workers=self._workers,
            machines=dict(self._machines),
            age_s=max(0.0, self._clock() - look.at_s) if look is not None else None,
            why=why,
        )
