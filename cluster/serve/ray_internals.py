"""Owns every use of private functions, attributes and parameters of Ray and Ray Serve.

All were checked with ray 2.60.0. tests/cluster/serve/test_ray_internals.py fails when Ray changes
one of them. Calls that reach Serve's controller block, and raise Ray's exceptions.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import _raylet, serve
from ray._private import node, parameter, ray_constants, services, state
from ray.experimental import internal_kv
from ray.serve._private import replica
from ray.serve._private.common import DeploymentID, ReplicaID, ReplicaState

from cluster.serve.replica_kinds import (
    ALL_KINDS,
    DeadReplica,
    ReplicaKind,
    application_name,
    deployment_name,
)
from protocol.roles import ROLES

CHECKED_RAY_VERSION = "2.60.0"

_NODE_S = 30.0  # as long as Ray itself waits for its node


def init_ray(folder: Path, **options: Any) -> Any:
    """Call ``ray.init`` with Ray's sockets and logs below ``folder``; return its context.

    Private: the parameter ``_temp_dir``. The default is /tmp/ray, which all users share. Ray
    2.60.0 has the setting in public only as ``ray start --temp-dir``."""
    init: Any = ray.init
    with _quick_start():
        return init(_temp_dir=str(folder), **options)


@contextlib.contextmanager
def _quick_start() -> Iterator[None]:
    """Make ``ray.init`` start no process that Baton does not use, and notice at once that the node
    has started, where Ray looks once a second.

    Private: parameters of ``RayParams`` that ``ray start`` has as options and ``ray.init`` lacks
    (no autoscaler of nodes, no copying of logs to drivers; any free port for the agent, which tries
    for 3 s to get the port that another Ray of this machine has); ``Node.start_api_server``, which
    starts a server without pages for ``include_dashboard=False``; and ``services.get_node``."""
    make_params: Any = parameter.RayParams
    changed: Any = partial(
        make_params, no_monitor=True, include_log_monitor=False, dashboard_agent_listen_port=0
    )
    get_node: Any = partial(_get_node_once_registered, services.get_node)
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (parameter, "RayParams", changed),
            (node.Node, "start_api_server", lambda *_, **__: None),
            (services, "get_node", get_node),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def _get_node_once_registered(get_node: Any, gcs_address: str, *which: str) -> Any:
    """Call ``get_node`` when a node is registered, or after _NODE_S."""
    raylet: Any = _raylet  # its stubs lack the class
    client = raylet.GcsClient(address=gcs_address)
    end = time.monotonic() + _NODE_S
    while not client.get_all_node_info(timeout=_NODE_S) and time.monotonic() < end:
        time.sleep(0.05)
    return get_node(gcs_address, *which)


def versioned_deployment(deployment: Any, version: str) -> Any:
    """Return the deployment with an explicit version.

    Private: ``Deployment.options(_internal=True)``, which allows ``version`` without a deprecation
    warning. Serve restarts exactly the replicas whose version differs; without one it would
    restart all of them in each update. Ray 2.60.0 has no public replacement."""
    return deployment.options(version=version, _internal=True)


def delete_application(kind: ReplicaKind) -> None:
    """Ask Serve to delete the kind's application, and return at once.

    Private: ``serve.delete(_blocking=False)``. A blocking call waits for 60 s at most, which is
    less than a drain may take. The public replacement would be a parameter ``blocking``."""
    serve.delete(application_name(kind), _blocking=False)


def running_count(replica_states: dict[Any, int]) -> int:
    """Return the number of running replicas in a deployment's status.

    Private: ``ReplicaState``, the key type of the public ``DeploymentStatusOverview``."""
    return replica_states.get(ReplicaState.RUNNING, 0)


def _controller() -> Any:
    """Return the actor handle of Serve's controller.

    Private: ``_get_global_client`` and ``ServeControllerClient._controller``. In public, Serve
    offers the two calls below only over HTTP, by the dashboard, which Baton does not start."""
    client = serve.context._get_global_client()
    assert client is not None  # callers have used Serve before, or are one of its replicas
    return client._controller


def application_details(timeout_s: float | None = None) -> dict[str, Any]:
    """Return all that Serve knows about each application, by its name.

    Private: ``ServeController.get_serve_instance_details``, since the method of the client has no
    timeout. Public, with a dashboard: GET /api/serve/applications/."""
    answer = _controller().get_serve_instance_details.remote()
    details: dict[str, Any] = ray.get(answer, timeout=timeout_s)["applications"]
    return details


def target_replicas(timeout_s: float) -> dict[ReplicaKind, int]:
    """Return the target number of replicas of each kind that is deployed."""
    applications = application_details(timeout_s)
    targets: dict[ReplicaKind, int] = {}
    for kind in ALL_KINDS:
        deployments = applications.get(application_name(kind), {}).get("deployments", {})
        if deployments:
            targets[kind] = sum(int(each["target_num_replicas"]) for each in deployments.values())
    return targets


def worker_gpus(timeout_s: float) -> float:
    """Return the GPUs that Ray reserves for each worker; 0 on CPUs."""
    applications = application_details(timeout_s)
    found = [
        float(each["deployment_config"].get("ray_actor_options", {}).get("num_gpus") or 0)
        for role in ROLES
        for each in applications.get(application_name(role), {}).get("deployments", {}).values()
    ]
    return max([0.0, *found])


def has_node_autoscaler() -> bool:
    """Return whether the Ray cluster has an autoscaler, which may add nodes for replicas.

    Private: ``internal_kv`` and the key under which the autoscaler reports its status; `ray status`
    reads the same. Ray 2.60.0 has it in public only over HTTP, by the dashboard."""
    return bool(internal_kv._internal_kv_get(ray_constants.DEBUG_AUTOSCALING_STATUS))


def dead_replicas() -> list[DeadReplica]:
    """Return the replicas whose process ended without Serve having stopped it.

    Private: ``state.actors``, its field ``DeathCause``, and Serve's names of actors. Ray 2.60.0 has
    them in public only as ``ray.util.state.list_actors``, by the dashboard."""
    kinds = {application_name(kind): kind for kind in ALL_KINDS}
    found = []
    for actor in state.actors(actor_state_name="DEAD").values():
        if not ReplicaID.is_full_id_str(actor["Name"]):
            continue
        replica_id, cause = ReplicaID.from_full_id_str(actor["Name"]), actor["DeathCause"]
        kind = kinds.get(replica_id.deployment_id.app_name)
        context = cause.WhichOneof("context")
        reasons = cause.actor_died_error_context
        died = context == "actor_died_error_context" and reasons.reason == reasons.WORKER_DIED
        if kind is not None and (died or context == "oom_context"):
            out_of_memory = context == "oom_context"
            found.append(DeadReplica(actor["ActorID"], kind, actor["Pid"], out_of_memory))
    return found


def set_target_replicas(kind: ReplicaKind, count: int, timeout_s: float) -> None:
    """Set the target number of replicas of a kind, without waiting for the replicas.

    Private: ``DeploymentID`` and ``ServeController.update_deployment_replicas``. Public, with a
    dashboard: POST /api/v1/applications/NAME/deployments/NAME/scale."""
    deployment = DeploymentID(name=deployment_name(kind), app_name=application_name(kind))
    answer = _controller().update_deployment_replicas.remote(deployment, count)
    ray.get(answer, timeout=timeout_s)


def keep_replica_on_loopback() -> None:
    """Make the replica that is being constructed open its internal gRPC port on loopback only.

    Private: ``serve._private.replica.add_port_to_grpc_server`` is replaced, since Serve listens on
    all interfaces and has no setting. All callers of the port are on the same host."""
    module: Any = replica
    add_port = module.add_port_to_grpc_server
    if getattr(add_port, "__module__", "") == __name__:
        return  # replaced before

    def on_loopback(server: Any, _address: str) -> int:
        return int(add_port(server, "127.0.0.1:0"))

    module.add_port_to_grpc_server = on_loopback
