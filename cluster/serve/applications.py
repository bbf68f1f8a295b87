"""The Ray Serve applications: two pools of workers, and the routers.

    baton-prefill   PrefillWorker x N       on nodes that declare `baton_prefill`
    baton-decode    DecodeWorker x M        on nodes that declare `baton_decode`
    baton-router    Router x R              on nodes that declare `baton_router`
    baton-autoscaler  Autoscaler, or Adviser  anywhere; only where autoscaler.mode says so

None gets Serve's requests: clients talk to the routers' own HTTP servers, and routers find workers
in Redis. So a stream passes through no process but its router's, and goes on while Ray's head is
away. The applications are apart, so that a drain can take the routers away first, and an update one
kind after the other.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import msgspec
from ray import serve

from cluster.serve.node import Place
from cluster.serve.replica_kinds import KINDS, NEVER_GIVE_UP, Kind, resource
from cluster.serve.replicas import KILL_S, Adviser, Autoscaler, DecodeWorker, PrefillWorker, Router
from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.settings.launch_settings import Launch
from cluster.settings.worker_settings import WorkerSettings, without_password
from protocol.roles import Role
from router.settings import RouterSettings

_REPLICA_CPUS = 0.1  # of Ray's count; what an engine really uses is for the kernel to share out
_HEALTH_PERIOD_S = 1.0
_DRAIN_POLL_S = 0.2

_CLASSES = {"prefill": PrefillWorker, "decode": DecodeWorker, "router": Router}


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
    if kind == "autoscaler":
        return int(launch.autoscaler.mode != "off")
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
    elif kind == "autoscaler":
        arguments = (_autoscaler_settings(launch), layout.place)
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
            "resources": {resource(kind): 1} if kind in KINDS else {},
        },
        graceful_shutdown_timeout_s=launch.drain_s + KILL_S,
        graceful_shutdown_wait_loop_s=_DRAIN_POLL_S,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=5.0,
        max_constructor_retry_count=NEVER_GIVE_UP,
    )
    deployment = make(_class(kind, launch))
    return deployment.options(version=_version(arguments), _internal=True).bind(*arguments)


def _class(kind: Kind, launch: Launch) -> Any:
    if kind == "autoscaler":
        return Autoscaler if launch.autoscaler.mode == "act" else Adviser
    return _CLASSES[kind]


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


def _autoscaler_settings(launch: Launch) -> AutoscalerSettings:
    """Likewise. Of a URL with a password, nodes know."""
    own, folder = launch.autoscaler, launch.run_dir
    url = own.prometheus_url
    return msgspec.structs.replace(
        own,
        model_id=launch.model_id,
        prometheus_url=url if url and without_password(url) == url else None,
        log=own.log or (f"{folder}/decisions.jsonl" if folder else None),
        tls=None,
    )
