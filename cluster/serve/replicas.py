"""What runs inside of Serve's replicas: one class for each kind (see ``serve_app``)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from cluster.autoscale.replica_counts import Aside
from cluster.local.start_report import on_stderr
from cluster.models import drafting, models
from cluster.serve import node, ray_runtime
from cluster.serve.node import Place
from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.settings.worker_settings import WorkerSettings
from cluster.sizing.snapshot import Counts, Worker
from protocol.errors import Unavailable
from protocol.roles import ROLES
from router.settings import RouterSettings

KILL_S = 15.0
"""After its time to drain, a replica that has not ended is killed."""


class WorkerReplica:
    """A worker's front inside a Serve replica; its engine is a child process of the replica."""

    async def __init__(self, settings: WorkerSettings, place: Place) -> None:  # type: ignore[misc]

        from cluster.worker.worker import Worker

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
        from router.http.server import HostedRouter

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


# MERGED cluster.located
# The model on the node of a replica: in its folder, or fetched from the hub.


def worker_model(settings: WorkerSettings) -> WorkerSettings:
    """``settings`` with folders of this node; "" stands for the demo model. Raises StartupError."""
    wanted = settings.model_path or None
    with on_stderr() as report:
        found = models.resolve(wanted, settings.model_id or None, report.download)
        drafts = settings.speculation
        if settings.role == "decode":
            drafts = drafting.resolve(drafts, wanted, report)
    return replace(settings, model_path=str(found.path), model_id=found.id, speculation=drafts)


def router_model(settings: RouterSettings) -> RouterSettings:
    """Likewise."""
    with on_stderr() as report:
        wanted = settings.model_path or None
        found = models.resolve(wanted, settings.model_id or None, report.download)
    return replace(settings, model_path=str(found.path), model_id=found.id)


# MERGED cluster.serve_counts
# Numbers of replicas, read and set through Ray Serve's interface for external scalers.

DEADLINE_S = 5.0


class ServeReplicas:
    """Of Baton's applications, by Ray Serve's interface for scalers that are not its own."""

    changes = True

    def __init__(self) -> None:
        self._aside = Aside("Ray Serve")

    async def targets(self, workers: Sequence[Worker]) -> Counts:
        from cluster.serve import ray_internals as serve_control

        try:
            found = await self._aside(lambda: serve_control.targets(DEADLINE_S), DEADLINE_S)
        except Exception as error:  # Ray has no common type for them
            raise Unavailable(f"numbers of replicas are not known: {_first(error)}") from error
        return Counts(**{role: found.get(role, 0) for role in ROLES})

    async def ask(self, before: Counts, after: Counts) -> None:
        from cluster.serve import ray_internals as serve_control

        for role in ROLES:
            if after.of(role) == before.of(role):
                continue
            ask = serve_control.asking(role, after.of(role), DEADLINE_S)
            try:
                await self._aside(ask, DEADLINE_S)
            except Exception as error:  # likewise
                raise Unavailable(f"{role} replicas are not changed: {_first(error)}") from error


def _first(error: Exception) -> str:
    """What it says, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
