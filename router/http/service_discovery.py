"""``/sd``: every live process as a Prometheus target (``http_sd_configs``), and the registration
of this router among them. Called by the routes and the state of the router, and by the autoscaler.

https://prometheus.io/docs/prometheus/latest/http_sd/ fixes the shape: a list of groups, each with
``targets`` (host:port) and ``labels``. Labels that begin with ``__meta_`` are for relabelling
and do not reach the series, which have their own role label.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

import redis.asyncio as redis
from redis.exceptions import RedisError

from protocol.endpoints.grpc_endpoints import host_of
from protocol.endpoints.metrics_server import MetricsServer
from protocol.registry.directory import (
    AutoscalerRecord,
    Directory,
    RouterRecord,
    WorkerRecord,
    new_instance_id,
)
from protocol.registry.leases import LeaseRenewer
from protocol.security.listen_hosts import is_loopback
from router.settings import RouterSettings

log = logging.getLogger(__name__)

_LIST_S = 1.0  # time limit of Redis for a list of routers


def target_groups(
    workers: Iterable[WorkerRecord],
    others: Iterable[RouterRecord | AutoscalerRecord],
    cluster: str,
    *,
    tls: bool,
) -> list[dict[str, Any]]:
    """Return one target group for each process that serves metrics, sorted by address.

    ``tls``: metrics beyond loopback are served over HTTPS.
    """
    processes: list[WorkerRecord | RouterRecord | AutoscalerRecord] = [*workers, *others]
    found = []
    for process in processes:
        if not process.metrics_endpoint:
            continue
        about = {"instance": process.instance, "pid": str(process.pid), "cluster": cluster}
        if isinstance(process, WorkerRecord):
            about |= {"role": process.role, "home": process.home or process.role}
            about |= {"model": process.model.id, "engine_pid": str(process.engine_pid)}
        else:
            role = "router" if isinstance(process, RouterRecord) else "autoscaler"
            about |= {"role": role, "model": process.model}
        labels = {f"__meta_baton_{name}": value for name, value in about.items()}
        is_remote = not is_loopback(host_of(process.metrics_endpoint))
        labels["__scheme__"] = "https" if tls and is_remote else "http"
        found.append({"targets": [process.metrics_endpoint], "labels": labels})
    return sorted(found, key=lambda group: str(group["targets"]))


class RouterRegistration:
    """A router's own metrics port and its record in the directory: start -> close.

    An address that several routers share leads to any of them; this port leads to one.
    """

    def __init__(self, settings: RouterSettings, page: Callable[[], bytes]) -> None:
        self.instance = new_instance_id()
        self._settings = settings
        self._server = MetricsServer(page)
        self._record: RouterRecord | None = None
        self._directory: Directory | None = None
        self._presence: LeaseRenewer[RouterRecord] | None = None
        self._others: list[RouterRecord] = []
        self._autoscalers: list[AutoscalerRecord] = []

    async def start(self, client: redis.Redis | None) -> None:
        """Listen, and register as soon as Redis is available. Raises StartupError.

        ``client`` is None where there is no Redis.
        """
        settings = self._settings
        endpoint = await self._server.start(
            settings.metrics_host, settings.metrics_port, settings.tls
        )
        record = self._record = RouterRecord(
            instance=self.instance,
            model=settings.model_id,
            metrics_endpoint=endpoint,
            pid=os.getpid(),
            url=settings.url,
        )
        if client is not None:
            self._directory = Directory(client, settings.cluster)
            self._presence = LeaseRenewer(self._directory.routers, lambda: record)
            self._presence.start_later(self.instance)

    async def close(self) -> None:
        if self._presence is not None:
            await self._presence.end()
        await self._server.close()

    async def list_processes(self) -> list[RouterRecord | AutoscalerRecord]:
        """Return this router, the others and autoscalers; without Redis, those last known."""
        assert self._record is not None
        if self._directory is not None:
            try:
                async with asyncio.timeout(_LIST_S):
                    self._others = await self._directory.routers.all()
                    self._autoscalers = await self._directory.autoscalers.all()
            except (RedisError, OSError, TimeoutError) as error:
                log.warning("routers cannot be listed: %s", error)
        others = [r for r in self._others if r.instance != self.instance]
        return [self._record, *others, *self._autoscalers]
