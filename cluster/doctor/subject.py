"""What is about to be started, as far as checks must know."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from cluster.settings.launch_settings import Launch
from cluster.settings.worker_settings import WorkerSettings, engine_of
from engine.ipc.spec import EngineSpec
from protocol.roles import ROLES, Role
from router.settings import RouterSettings

What: TypeAlias = Literal["cluster", "worker", "router"]


class Pool(msgspec.Struct, frozen=True):
    """Workers of one role, all alike."""

    role: Role
    workers: int
    engine: EngineSpec


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """``ports``: what is to be listened on; 0: any. ``port_moves``: the next free one will do."""

    what: What = "cluster"
    model: str | None = None
    host: str = "127.0.0.1"
    ports: tuple[int, ...] = ()
    port_moves: bool = False
    redis_url: str | None = None
    cluster: str = "default"
    pools: tuple[Pool, ...] = ()

    @property
    def workers(self) -> int:
        return sum(pool.workers for pool in self.pools)

    @property
    def device(self) -> str | None:
        """The one that is asked for; None: a GPU where there is one."""
        return self.pools[0].engine.device if self.pools else "cpu"


def of_launch(launch: Launch, model: str | None, *, port_moves: bool) -> Wanted:
    """A whole cluster on this machine."""
    counts = {"prefill": launch.prefill, "decode": launch.decode}
    pools = [Pool(role, counts[role], engine_of(launch.workers[role])) for role in ROLES]
    return Wanted(
        model=model,
        host=launch.host,
        ports=(launch.port,),
        port_moves=port_moves,
        redis_url=launch.redis_url,
        cluster=launch.cluster,
        pools=tuple(pool for pool in pools if pool.workers),
    )


def of_worker(settings: WorkerSettings, model: str | None) -> Wanted:
    """One worker without Ray."""
    return Wanted(
        what="worker",
        model=model,
        host=settings.host,
        ports=(settings.port, settings.kv_port, settings.metrics_port),
        redis_url=settings.redis_url,
        cluster=settings.cluster,
        pools=(Pool(settings.role, 1, engine_of(settings)),),
    )


def of_router(settings: RouterSettings, model: str | None, host: str, port: int) -> Wanted:
    """One router without Ray."""
    return Wanted(
        what="router",
        model=model,
        host=host,
        ports=(port,),
        redis_url=settings.redis_url,
        cluster=settings.cluster,
    )
