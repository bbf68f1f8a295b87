"""Reads the cluster once for each turn: workers from the directory, traffic from routers or
Prometheus.

Every failure ends in a ClusterReading within a few seconds: without a mix where the directory or
the metrics are missing or old, and with everything else as last known.
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
from cluster.observation.prometheus_api import PrometheusApi, check_prometheus_url
from cluster.observation.reading import ClusterReading, TrafficReading, TrafficSource
from cluster.observation.router_pages import RouterScraper
from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.sizing.snapshot import MachineModel, ObservedLatency, RequestMix, WorkerSnapshot
from protocol.errors import Unavailable
from protocol.registry.directory import Directory, RouterRecord, WorkerRecord
from protocol.roles import Role

log = logging.getLogger("baton.autoscaler")

DIRECTORY_DEADLINE_S = 2.0
MAX_LISTED_WORKERS = 4096
FORGET_S = 600.0
"""A worker that returns after this counts as new; a directory that was emptied fills up before."""


def open_reader(settings: AutoscalerSettings, client: redis.Redis) -> ClusterReader:
    """Return a reader for ``async with``. Raises StartupError for a URL of Prometheus, or TLS
    files, that cannot be used."""
    interval_s, window_s = settings.interval_s, settings.window_s
    source: TrafficSource
    if settings.prometheus_url is not None:
        url = check_prometheus_url(settings.prometheus_url)
        source = PrometheusApi(url, settings.cluster, interval_s=interval_s, window_s=window_s)
    else:
        source = RouterScraper(
            settings.cluster, settings.tls, interval_s=interval_s, window_s=window_s
        )
    directory = Directory(client, settings.cluster)
    return ClusterReader(directory, source, warm_up_s=settings.warm_up_s)


class ClusterReader:
    """Implements ``ReadingSource``. ``clock``: monotonic. Workers of the first reading count as
    warm."""

    def __init__(
        self,
        directory: Directory,
        source: TrafficSource,
        *,
        warm_up_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._source = directory, source
        self._warm_up_s, self._clock = warm_up_s, clock
        self._traffic: TrafficReading | None = None
        self._workers: tuple[WorkerSnapshot, ...] = ()
        self._machines: dict[Role, MachineModel] = {}
        self._since: dict[str, tuple[float, float]] = {}  # by instance: first and last seen
        self._has_read = False
        self._listed_s = clock()  # when the directory last had a worker
        self._last_reason = ""

    async def __aenter__(self) -> Self:
        await self._source.__aenter__()
        return self

    async def __aexit__(self, *gone: object) -> None:
        await self._source.__aexit__(*gone)

    async def read(self) -> ClusterReading:
        at_s = self._clock()
        try:
            async with asyncio.timeout(DIRECTORY_DEADLINE_S):
                records = await self._directory.workers.all()
                routers = await self._directory.routers.all()
        except (RedisError, OSError, TimeoutError):
            return self._reading(at_s, None, "Redis does not answer")
        if len(records) > MAX_LISTED_WORKERS:
            return self._reading(at_s, None, f"the directory lists {len(records)} workers")
        emptied = not records and at_s - self._listed_s <= self._source.stale_s
        if not emptied:
            self._update_workers(records, at_s)
        why = await self._update_traffic(routers)
        traffic = self._traffic
        if traffic is None or self._clock() - traffic.at_s > self._source.stale_s:
            return self._reading(at_s, None, why or "metrics are old")
        if emptied:
            return self._reading(at_s, None, "the directory was emptied, or all workers are gone")
        mix = replace(
            traffic.mix,
            backlog_tokens=traffic.mix.backlog_tokens + workers.backlog_tokens(records),
            residents=workers.resident_count(records),
        )
        return self._reading(at_s, mix, "")

    async def _update_traffic(self, routers: list[RouterRecord]) -> str:
        """Read the traffic; return why it failed, or nothing."""
        try:
            self._traffic = await self._source.read_traffic(routers)
        except Unavailable as error:
            return str(error)
        return ""

    def _update_workers(self, records: list[WorkerRecord], at_s: float) -> None:
        for record in records:
            first = at_s if self._has_read else at_s - self._warm_up_s
            first, _ = self._since.get(record.instance, (first, at_s))
            self._since[record.instance] = first, at_s
        self._has_read = True
        self._since = {i: s for i, s in self._since.items() if at_s - s[1] < FORGET_S}
        if records:
            self._listed_s = at_s
        self._workers = tuple(
            workers.worker_snapshot(r, young=self._is_young(r, at_s)) for r in records
        )
        self._machines |= workers.machine_models(records)

    def _is_young(self, record: WorkerRecord, at_s: float) -> bool:
        return at_s - self._since[record.instance][0] < self._warm_up_s

    def _reading(self, at_s: float, mix: RequestMix | None, why: str) -> ClusterReading:
        if why != self._last_reason and why:
            log.warning("the pools stay as they are: %s", why)
        self._last_reason = why
        traffic = self._traffic
        return ClusterReading(
            at_s=at_s,
            mix=mix,
            observed=traffic.observed if traffic is not None else ObservedLatency(),
            workers=self._workers,
            machines=dict(self._machines),
            age_s=max(0.0, self._clock() - traffic.at_s) if traffic is not None else None,
            why=why,
        )
