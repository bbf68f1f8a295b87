"""The classes that run inside Ray Serve's replicas: workers, routers, the autoscaler.

Serve creates and destroys the instances: it awaits ``__init__``, polls ``check_health`` (a replica
is replaced after three failures in a row), and awaits ``__del__`` to shut a replica down.
``applications`` says how they are deployed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from cluster.autoscale.replica_counts import BlockingCall
from cluster.local.start_report import stderr_reporter
from cluster.local.timed_log import log_with_times
from cluster.models import drafting, locate
from cluster.serve import node_settings, ray_internals
from cluster.serve.node_settings import ReplicaContext, node_config
from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.settings.worker_settings import WorkerSettings
from cluster.sizing.snapshot import WorkerCounts, WorkerSnapshot
from protocol.descriptor_limit import raise_descriptor_limit
from protocol.errors import Unavailable
from protocol.roles import ROLES
from router.settings import RouterSettings

_log = logging.getLogger("baton.replica")

KILL_S = 15.0
"""Seconds after its drain time at which Serve kills a replica that has not ended."""
_STOP_MARGIN_S = 10.0
_CONTROLLER_TIMEOUT_S = 5.0


class WorkerReplica:
    """A worker's front inside a replica; its engine is a child process of the replica."""

    async def __init__(  # type: ignore[misc]
        self, settings: WorkerSettings, context: ReplicaContext
    ) -> None:
        from cluster.worker.worker import Worker

        address = _prepare_replica(context)
        own = node_settings.worker_settings_here(settings, node_config(), address)
        located = await asyncio.to_thread(resolve_worker_model, own)
        self._drain_s = context.drain_s
        self._worker = Worker(located, partial(context.report, own.role))
        await self._worker.start()

    def check_health(self) -> None:
        _raise_problem(self._worker.problem())

    async def __del__(self) -> None:
        # The timeout makes sure that it ends: otherwise Serve kills the replica, and the engine
        # would outlive its front.
        worker = getattr(self, "_worker", None)
        if worker is not None:
            drain_s = 0.0 if worker.problem() else self._drain_s
            async with asyncio.timeout(drain_s + _STOP_MARGIN_S):
                await worker.stop(drain_s)


class PrefillReplica(WorkerReplica):
    """A worker of the prefill pool."""


class DecodeReplica(WorkerReplica):
    """A worker of the decode pool."""


class RouterReplica:
    """A router with its own HTTP server inside a replica."""

    async def __init__(  # type: ignore[misc]
        self, settings: RouterSettings, context: ReplicaContext, host: str, port: int
    ) -> None:
        from router.http.server import HostedRouter

        address = _prepare_replica(context)
        own = node_settings.router_settings_here(settings, node_config(), address)
        located = await asyncio.to_thread(resolve_router_model, own)
        self._drain_s = context.drain_s
        self._server = HostedRouter(located, address or host, port, context.drain_s)
        await self._server.start()
        _log.info("ready: router, pid %d, on port %d", os.getpid(), port)

    def check_health(self) -> None:
        _raise_problem(self._server.problem())

    async def __del__(self) -> None:
        server = getattr(self, "_server", None)
        if server is not None:
            async with asyncio.timeout(self._drain_s + _STOP_MARGIN_S):
                await server.stop()


class AutoscalerReplica:
    """The autoscaler, which sets the replica counts of the pools or only advises."""

    async def __init__(  # type: ignore[misc]
        self, settings: AutoscalerSettings, context: ReplicaContext
    ) -> None:
        from cluster.autoscale.process import AutoscalerService

        address = _prepare_replica(context)
        own = node_settings.autoscaler_settings_here(settings, node_config(), address)
        self._service = AutoscalerService(
            own, ServeReplicas(), partial(context.report, "autoscaler")
        )
        await self._service.start()
        _log.info("ready: autoscaler (%s), pid %d", own.mode, os.getpid())

    def check_health(self) -> None:
        _raise_problem(self._service.problem())

    async def __del__(self) -> None:
        service = getattr(self, "_service", None)
        if service is not None:
            async with asyncio.timeout(KILL_S):
                await service.stop()


def _prepare_replica(context: ReplicaContext) -> str | None:
    """Check the program, raise the limit of open files, and return the address to listen on; None:
    the configured one."""
    log_with_times()
    context.check_program()
    raise_descriptor_limit()
    ray_internals.keep_replica_on_loopback()
    return context.listen_address()


def _raise_problem(problem: str | None) -> None:
    if problem is not None:
        raise RuntimeError(problem)


def resolve_worker_model(settings: WorkerSettings) -> WorkerSettings:
    """Return ``settings`` with the folders of the model and its draft on this node.

    A missing model is downloaded. An empty path means the demo model. Raises StartupError."""
    wanted = settings.engine.model_path or None
    with stderr_reporter() as report:
        found = locate.resolve_model(wanted, settings.model_id or None, report.download)
        drafts = drafting.resolve_draft(settings.engine.speculation, wanted, report)
    return settings.with_model(str(found.path), found.id, speculation=drafts)


def resolve_router_model(settings: RouterSettings) -> RouterSettings:
    """Return ``settings`` with the folder of the model on this node, which may lack the weights.

    A missing config and tokenizer are downloaded. Raises StartupError."""
    with stderr_reporter() as report:
        found = locate.resolve_model(
            settings.model_path or None, settings.model_id or None, report.download, weights=False
        )
    return replace(settings, model_path=str(found.path), model_id=found.id)


class ServeReplicas:
    """Reads and sets the replica counts of the pools, for the autoscaler's ``ReplicaController``.

    It uses Ray Serve's interface for external scalers (``external_scaler_enabled``)."""

    changes = True

    def __init__(self) -> None:
        self._call = BlockingCall("Ray Serve")

    async def targets(self, workers: Sequence[WorkerSnapshot]) -> WorkerCounts:
        read = partial(ray_internals.target_replicas, _CONTROLLER_TIMEOUT_S)
        try:
            found = await self._call(read, _CONTROLLER_TIMEOUT_S)
        except Exception as error:  # Ray's errors have no common type
            raise Unavailable(
                f"the numbers of replicas cannot be read: {_last_line(error)}"
            ) from error
        return WorkerCounts(**{role: found.get(role, 0) for role in ROLES})

    async def ask(self, before: WorkerCounts, after: WorkerCounts) -> None:
        for role in ROLES:
            count = after.of(role)
            if count == before.of(role):
                continue
            write = partial(ray_internals.set_target_replicas, role, count, _CONTROLLER_TIMEOUT_S)
            try:
                await self._call(write, _CONTROLLER_TIMEOUT_S)
            except Exception as error:  # Ray's errors have no common type
                text = f"{role} replicas could not be changed: {_last_line(error)}"
                raise Unavailable(text) from error


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
