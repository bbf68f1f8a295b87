"""What runs inside of Serve's replicas: one class for each kind (see ``serve_app``)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cluster import node, ray_runtime
from cluster.autoscale.settings import AutoscalerSettings
from cluster.place import Place
from cluster.settings import WorkerSettings

if TYPE_CHECKING:
    from router.settings import RouterSettings

KILL_S = 15.0
"""After its time to drain, a replica that has not ended is killed."""


class WorkerReplica:
    """A worker's front inside a Serve replica; its engine is a child process of the replica."""

    async def __init__(self, settings: WorkerSettings, place: Place) -> None:  # type: ignore[misc]
        from cluster.located import worker_model
        from cluster.worker import Worker

        place.check()
        ray_runtime.keep_replica_on_loopback()
        self._place = place
        own = node.worker(settings, node.here(), place.address())
        role = own.role
        self._worker = Worker(
            await asyncio.to_thread(worker_model, own), lambda text: place.say(role, text)
        )
        await self._worker.start()

    def check_health(self) -> None:
        """Serve replaces the replica after three failures in a row."""
        problem = self._worker.problem()
        if problem is not None:
            raise RuntimeError(problem)

    async def __del__(self) -> None:
        # Serve awaits it when it stops the replica. It must end, or the engine outlives its turn.
        worker = getattr(self, "_worker", None)
        if worker is not None:
            drain_s = 0.0 if worker.problem() else self._place.drain_s
            async with asyncio.timeout(drain_s + 10.0):
                await worker.stop(drain_s)


class PrefillWorker(WorkerReplica):
    """Replica of the prefill pool."""


class DecodeWorker(WorkerReplica):
    """Replica of the decode pool."""


class Router:
    """A router with its HTTP server, within the replica."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: RouterSettings, place: Place, host: str, port: int
    ) -> None:
        from cluster.http_server import HostedRouter
        from cluster.located import router_model

        place.check()
        ray_runtime.keep_replica_on_loopback()
        address = place.address()
        own = node.router(settings, node.here(), address)
        located = await asyncio.to_thread(router_model, own)
        self._drain_s = place.drain_s
        self._server = HostedRouter(located, address or host, port, place.drain_s)
        await self._server.start()

    def check_health(self) -> None:
        problem = self._server.problem()
        if problem is not None:
            raise RuntimeError(problem)

    async def __del__(self) -> None:
        server = getattr(self, "_server", None)
        if server is not None:
            async with asyncio.timeout(self._drain_s + 10.0):
                await server.stop()


class Autoscaler:
    """The one that changes numbers and roles of workers."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: AutoscalerSettings, place: Place
    ) -> None:
        from cluster.autoscale.process import Autoscaler as Process
        from cluster.serve_counts import ServeReplicas

        place.check()
        ray_runtime.keep_replica_on_loopback()
        own = node.autoscaler(settings, node.here(), place.address())
        self._process = Process(own, ServeReplicas(), lambda text: place.say("autoscaler", text))
        await self._process.start()

    def check_health(self) -> None:
        problem = self._process.problem()
        if problem is not None:
            raise RuntimeError(problem)

    async def __del__(self) -> None:
        process = getattr(self, "_process", None)
        if process is not None:
            async with asyncio.timeout(KILL_S):
                await process.stop()


class Adviser(Autoscaler):
    """One that says what it would do. Serve knows it by another name: so do those who want to know
    whether numbers are theirs to change."""
