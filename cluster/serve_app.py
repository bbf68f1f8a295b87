"""The Ray Serve applications: two pools of workers, and the routers.

    baton-prefill   PrefillWorker x N       on nodes that declare `baton_prefill`
    baton-decode    DecodeWorker x M        on nodes that declare `baton_decode`
    baton-router    Router x R              on nodes that declare `baton_router`

None gets Serve's requests: clients talk to the routers' own HTTP servers, and routers find workers
in Redis. So a stream passes through no process but its router's, and goes on while Ray's head is
away. The applications are apart, so that a drain can take the routers away first, and an update one
kind after the other.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from ray import serve

from cluster import node, ray_runtime
from cluster.kinds import NEVER_GIVE_UP, Kind, resource
from cluster.launch import Launch
from cluster.place import Place
from cluster.settings import Role, WorkerSettings

if TYPE_CHECKING:
    from router.settings import RouterSettings

_REPLICA_CPUS = 0.1  # of Ray's count; what an engine really uses is for the kernel to share out
_HEALTH_PERIOD_S = 1.0
KILL_S = 15.0
"""After its time to drain, a replica that has not ended is killed."""
_DRAIN_POLL_S = 0.2


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


_CLASSES = {"prefill": PrefillWorker, "decode": DecodeWorker, "router": Router}


def class_name(kind: Kind) -> str:
    """Which is what Serve calls the deployment."""
    return _CLASSES[kind].__name__


class Layout(NamedTuple):
    """How replicas are laid out. ``gpus``: of each worker; 0: they compute on CPUs."""

    place: Place
    gpus: float

    @property
    def cuda(self) -> bool:
        return self.gpus > 0


def gpu_share(gpus: int, workers: int) -> float:
    """GPUs for each worker of one machine: a whole one where there are enough, else an equal
    part."""
    if gpus == 0:
        return 0.0
    return 1.0 if gpus >= workers else int(10_000 * gpus / workers) / 10_000


def count(kind: Kind, launch: Launch) -> int:
    return {"prefill": launch.prefill, "decode": launch.decode, "router": launch.routers}[kind]


def built(kind: Kind, launch: Launch, layout: Layout, room: int) -> Any:
    """The application of one kind (serve.Application is untyped). Its version is what it is made
    of, so that another number of replicas restarts none of those that are there. ``room``: for so
    many more of them; that many are started before old ones are stopped."""
    wanted = count(kind, launch)
    arguments: tuple[Any, ...]
    if kind == "router":
        arguments = (_router_settings(launch), layout.place, launch.host, launch.port)
        gpus = 0.0
    else:
        arguments = (_worker_settings(launch, kind, cuda=layout.cuda), layout.place)
        gpus = layout.gpus
    make: Any = serve.deployment(
        num_replicas=wanted,
        max_surge_percent=min(100, 100 * room // max(1, wanted)),
        ray_actor_options={
            "num_cpus": _REPLICA_CPUS,
            "num_gpus": gpus,
            "resources": {resource(kind): 1},
        },
        graceful_shutdown_timeout_s=launch.drain_s + KILL_S,
        graceful_shutdown_wait_loop_s=_DRAIN_POLL_S,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=5.0,
        max_constructor_retry_count=NEVER_GIVE_UP,
    )
    deployment = make(_CLASSES[kind])
    return deployment.options(version=_version(arguments), _internal=True).bind(*arguments)


def _version(arguments: tuple[Any, ...]) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(arguments)).hexdigest()[:16]


def _worker_settings(launch: Launch, role: Role, *, cuda: bool) -> WorkerSettings:
    """Of one worker, without what is its node's."""
    settings = launch.workers[role]
    return msgspec.structs.replace(
        settings,
        model_path=launch.model_path,
        model_id=launch.model_id,
        device=settings.device or ("cuda" if cuda else "cpu"),
        tls=None,
    )


def _router_settings(launch: Launch) -> RouterSettings:
    """Likewise."""
    return msgspec.structs.replace(
        launch.router,
        model_path=launch.model_path,
        model_id=launch.model_id,
        tls=None,
        http_tls=None,
        api_keys=None,
    )
