"""The Ray Serve applications: two pools of workers, and the router.

    baton-prefill   PrefillWorker x N       get no Serve requests; Redis lists them
    baton-decode    DecodeWorker x M
    baton-router    Router (HTTP ingress)   finds the workers in Redis

They are apart, so that a drain can take the router away first: it finishes its requests while the
workers still work. Secrets come to a replica in its environment, not through Ray's storage.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from ray import serve

from cluster import events, ray_runtime
from cluster.launch import Launch
from cluster.settings import Role, WorkerSettings
from protocol.errors import StartupError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from router.settings import RouterSettings

POOL_APPS: dict[Role, str] = {"prefill": "baton-prefill", "decode": "baton-decode"}
ROUTER_APP = "baton-router"
TOKEN_VARIABLE = "BATON_TOKEN"
SECRET_VARIABLE = "BATON_SECRET"

_REPLICA_CPUS = 0.1  # of Ray's count; what an engine really uses is for the kernel to share out
_ROUTER_REQUESTS = 4096  # the router admits or refuses by itself, long before
_HEALTH_PERIOD_S = 1.0
_DRAIN_POLL_S = 0.2


class WorkerReplica:
    """A worker's front inside a Serve replica; its engine is a child process of the replica."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: WorkerSettings, events_path: str, drain_s: float
    ) -> None:
        from cluster.worker import Worker

        ray_runtime.keep_replica_on_loopback()
        self._drain_s = drain_s
        self._role, self._write = settings.role, events.Writer(Path(events_path))
        settings = msgspec.structs.replace(settings, token=_secret(TOKEN_VARIABLE))
        self._worker = Worker(settings, self._say)
        await self._worker.start()

    def _say(self, text: str) -> None:
        prefix = "" if text.startswith(self._role) else f"{self._role}: "
        self._write(events.Note(prefix + text))

    def check_health(self) -> None:
        """Serve replaces the replica after three failures in a row."""
        problem = self._worker.problem()
        if problem is not None:
            raise RuntimeError(problem)

    async def __del__(self) -> None:
        # Serve awaits it when it stops the replica. It must end, or the engine outlives its turn.
        worker = getattr(self, "_worker", None)
        if worker is not None:
            drain_s = 0.0 if worker.problem() else self._drain_s
            async with asyncio.timeout(drain_s + 10.0):
                await worker.stop(drain_s)


class PrefillWorker(WorkerReplica):
    """Replica of the prefill pool."""


class DecodeWorker(WorkerReplica):
    """Replica of the decode pool."""


@serve.ingress()  # type: ignore[untyped-decorator, unused-ignore]
class Router:
    """The router's HTTP application, built within the replica."""

    def __init__(self, settings: RouterSettings) -> None:
        ray_runtime.keep_replica_on_loopback()
        self._settings = settings

    def __serve_build_asgi_app__(self) -> ASGIApp:
        from router.app import create_app
        from router.heap import settle

        secret = bytes.fromhex(_secret(SECRET_VARIABLE))
        app = create_app(
            msgspec.structs.replace(self._settings, token=_secret(TOKEN_VARIABLE), secret=secret)
        )
        settle()
        return app


def _secret(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise StartupError(f"{name} is not set in the environment of the replica")
    return value


def worker_settings(launch: Launch, role: Role, redis_url: str, *, cuda: bool) -> WorkerSettings:
    """Settings of one worker, without the token."""
    settings = launch.workers[role]
    return msgspec.structs.replace(
        settings,
        redis_url=redis_url,
        model_path=launch.model_path,
        model_id=launch.model_id,
        device=settings.device or ("cuda" if cuda else "cpu"),
    )


def router_settings(launch: Launch, redis_url: str) -> RouterSettings:
    """Settings of the router, without token and secret."""
    return msgspec.structs.replace(
        launch.router,
        redis_url=redis_url,
        model_path=launch.model_path,
        model_id=launch.model_id,
        adds_request_id=False,  # Serve does
    )


def gpu_share(gpus: int, workers: int) -> float:
    """GPUs for each worker: a whole one where there are enough, else an equal part."""
    if gpus == 0:
        return 0.0
    return 1.0 if gpus >= workers else int(10_000 * gpus / workers) / 10_000


def pool_application(
    role: Role, count: int, settings: WorkerSettings, gpus: float, launch: Launch
) -> Any:  # serve.Application is untyped
    """One pool of workers."""
    make: Any = serve.deployment(
        num_replicas=count,
        ray_actor_options={"num_cpus": _REPLICA_CPUS, "num_gpus": gpus},
        max_ongoing_requests=_ROUTER_REQUESTS,
        graceful_shutdown_timeout_s=launch.drain_s + 15.0,
        graceful_shutdown_wait_loop_s=_DRAIN_POLL_S,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=5.0,
        max_constructor_retry_count=2,
    )
    deployment = make(PrefillWorker if role == "prefill" else DecodeWorker)
    return deployment.bind(settings, launch.events_path, launch.drain_s)


def router_application(settings: RouterSettings, drain_s: float) -> Any:
    """The router's application."""
    make: Any = serve.deployment(
        ray_actor_options={"num_cpus": _REPLICA_CPUS},
        max_ongoing_requests=_ROUTER_REQUESTS,
        graceful_shutdown_timeout_s=drain_s,
        graceful_shutdown_wait_loop_s=_DRAIN_POLL_S,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=5.0,
        max_constructor_retry_count=2,
    )
    return make(Router).bind(settings)
