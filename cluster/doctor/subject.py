"""Describes what is about to be started, as far as the checks need to know it."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from cluster.settings.launch_settings import LaunchSettings, share_of_gpu
from cluster.settings.worker_settings import WorkerSettings
from engine.ipc.settings import EngineSettings
from protocol.roles import ROLES, Role
from router.settings import RouterSettings

SubjectKind: TypeAlias = Literal["cluster", "worker", "router"]


class SubjectPool(msgspec.Struct, frozen=True):
    """The workers of one role, which all have the same settings."""

    role: Role
    workers: int
    engine: EngineSettings


class DoctorSubject(msgspec.Struct, frozen=True, kw_only=True):
    """What the checks examine: a whole cluster, one worker, or one router.

    ``ports``: ports to listen on, 0 for any. ``port_moves``: the next free port is used instead of
    a port that is taken. ``most_workers``: workers that may come to share the machine's GPUs.
    ``gpus``: number of GPUs that workers may use; None: those that this process sees.
    ``connections``: clients that a router takes at once; 0: there is no router."""

    kind: SubjectKind = "cluster"
    model: str | None = None
    host: str = "127.0.0.1"
    ports: tuple[int, ...] = ()
    port_moves: bool = False
    redis_url: str | None = None
    cluster: str = "default"
    pools: tuple[SubjectPool, ...] = ()
    most_workers: int = 0
    gpus: int | None = None
    connections: int = 0

    @property
    def weights(self) -> bool:
        """Whether the model's weights are needed: routers load its tokenizer only."""
        return self.kind != "router"

    @property
    def workers(self) -> int:
        return sum(pool.workers for pool in self.pools)

    @property
    def device(self) -> str | None:
        """The configured device; None means a GPU if there is one."""
        return self.pools[0].engine.device if self.pools else "cpu"

    def gpu_share(self, gpus: int) -> float:
        """Return the share of its GPU that each engine may take, as the engines are told."""
        configured = self.pools[0].engine.gpu_share if self.pools else None
        sharing = self.workers if gpus >= self.workers else max(self.workers, self.most_workers)
        return configured or share_of_gpu(gpus, sharing)


def cluster_subject(
    launch: LaunchSettings, model: str | None, *, port_moves: bool
) -> DoctorSubject:
    """Describe a whole cluster on this machine."""
    counts = {"prefill": launch.prefill, "decode": launch.decode}
    pools = [SubjectPool(role, counts[role], launch.workers[role].engine) for role in ROLES]
    return DoctorSubject(
        model=model,
        host=launch.host,
        ports=(launch.port,),
        port_moves=port_moves,
        redis_url=launch.redis_url,
        cluster=launch.cluster,
        pools=tuple(pool for pool in pools if pool.workers),
        most_workers=launch.most_workers(gpus=0),
        connections=launch.router.max_connections,
    )


def worker_subject(settings: WorkerSettings, model: str | None) -> DoctorSubject:
    """Describe one worker without Ray."""
    return DoctorSubject(
        kind="worker",
        model=model,
        host=settings.host,
        ports=(
            *(settings.port, settings.kv_port),
            *(settings.kv_tcp_port, settings.metrics_port),
        ),
        redis_url=settings.redis_url,
        cluster=settings.cluster,
        pools=(SubjectPool(settings.role, 1, settings.engine),),
    )


def router_subject(
    settings: RouterSettings, model: str | None, host: str, port: int
) -> DoctorSubject:
    """Describe one router without Ray."""
    return DoctorSubject(
        kind="router",
        model=model,
        host=host,
        ports=(port,),
        redis_url=settings.redis_url,
        cluster=settings.cluster,
        connections=settings.max_connections,
    )
