"""Builds the Ray Serve applications: two pools of workers, the routers, and the autoscaler.

    baton-prefill     PrefillWorker x N       on nodes that declare `baton_prefill`
    baton-decode      DecodeWorker x M        on nodes that declare `baton_decode`
    baton-router      Router x R              on nodes that declare `baton_router`
    baton-autoscaler  Autoscaler, or Adviser  on any node; only when autoscaler.mode is not off

Serve forwards no requests: clients talk to the routers' own HTTP servers, and routers find workers
in Redis. A stream therefore passes through its router only, and continues while Ray's head is
down. Separate applications let a drain remove the routers first, and let an update replace one kind
after the other. ``deploy`` calls this module; the classes are in ``replicas``.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import msgspec
from ray import serve

from cluster.serve import ray_internals
from cluster.serve.node_settings import ReplicaContext
from cluster.serve.replica_kinds import (
    SCALABLE_KINDS,
    UNLIMITED_RETRIES,
    ReplicaKind,
    deployment_name,
    resource_name,
)
from cluster.serve.replicas import (
    KILL_S,
    AutoscalerReplica,
    DecodeReplica,
    PrefillReplica,
    RouterReplica,
)
from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.settings.connection import without_password
from cluster.settings.launch_settings import LaunchSettings
from cluster.settings.worker_settings import WorkerSettings
from protocol.roles import Role
from router.settings import RouterSettings

_REPLICA_CPUS = 0.1  # Ray's bookkeeping only; the kernel shares out what engines really use
_HEALTH_PERIOD_S = 1.0
_DRAIN_POLL_S = 0.2

_CLASSES = {
    "prefill": PrefillReplica,
    "decode": DecodeReplica,
    "router": RouterReplica,
    "autoscaler": AutoscalerReplica,
}


class ReplicaLayout(NamedTuple):
    """Where replicas run. ``gpus``: GPUs of each worker (``share_of_gpu``), 0 when workers compute
    on CPUs."""

    context: ReplicaContext
    gpus: float

    @property
    def cuda(self) -> bool:
        return self.gpus > 0


def configured_replicas(kind: ReplicaKind, launch: LaunchSettings) -> int:
    if kind == "autoscaler":
        return int(launch.autoscaler.mode != "off")
    return {"prefill": launch.prefill, "decode": launch.decode, "router": launch.routers}[kind]


def build_application(
    kind: ReplicaKind, launch: LaunchSettings, layout: ReplicaLayout, surge: int
) -> Any:
    """Return the Serve application of one kind (serve.Application is untyped).

    Its version is a hash of the replicas' arguments, so that another replica count restarts no
    running replica. An update may start ``surge`` new replicas before it stops old ones."""
    wanted = configured_replicas(kind, launch)
    arguments = _replica_arguments(kind, launch, layout)
    make: Any = serve.deployment(
        name=deployment_name(kind, advising=launch.autoscaler.mode != "act"),
        num_replicas=wanted,
        max_surge_percent=min(100, 100 * surge // max(1, wanted)),
        ray_actor_options={
            "num_cpus": _REPLICA_CPUS,
            "num_gpus": layout.gpus if kind in ("prefill", "decode") else 0.0,
            "resources": {resource_name(kind): 1} if kind in SCALABLE_KINDS else {},
        },
        graceful_shutdown_timeout_s=launch.drain_s + KILL_S,
        graceful_shutdown_wait_loop_s=_DRAIN_POLL_S,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=5.0,
        max_constructor_retry_count=UNLIMITED_RETRIES,
    )
    version = hashlib.sha256(msgspec.msgpack.encode(arguments)).hexdigest()[:16]
    return ray_internals.versioned_deployment(make(_CLASSES[kind]), version).bind(*arguments)


def _replica_arguments(
    kind: ReplicaKind, launch: LaunchSettings, layout: ReplicaLayout
) -> tuple[Any, ...]:
    if kind == "router":
        return _router_settings(launch), layout.context, launch.host, launch.port
    if kind == "autoscaler":
        return _autoscaler_settings(launch), layout.context
    return _worker_settings(launch, kind, layout), layout.context


def _worker_settings(launch: LaunchSettings, role: Role, layout: ReplicaLayout) -> WorkerSettings:
    """Return a worker's settings without those that its node adds (see ``node_settings``)."""
    settings = launch.workers[role]
    device = settings.engine.device or ("cuda" if layout.cuda else "cpu")
    share = settings.engine.gpu_share or layout.gpus or None
    located = settings.with_model(
        launch.model_path, launch.model_id, device=device, gpu_share=share
    )
    return msgspec.structs.replace(located, tls=None)


def _router_settings(launch: LaunchSettings) -> RouterSettings:
    return msgspec.structs.replace(
        launch.router,
        model_path=launch.model_path,
        model_id=launch.model_id,
        tls=None,
        http_tls=None,
        api_keys=None,
    )


def _autoscaler_settings(launch: LaunchSettings) -> AutoscalerSettings:
    """A Prometheus URL that contains a password is passed to nodes by their environment only."""
    own, folder = launch.autoscaler, launch.run_dir
    url = own.prometheus_url
    return msgspec.structs.replace(
        own,
        model_id=launch.model_id,
        prometheus_url=url if url and without_password(url) == url else None,
        log=own.log or (f"{folder}/decisions.jsonl" if folder else None),
        tls=None,
    )
