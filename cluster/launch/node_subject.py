"""Says what the doctor checks on a node of a Ray cluster: the replicas that may run there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from cluster.doctor.subject import DoctorSubject, SubjectPool
from cluster.serve.ray_nodes import RayNode
from cluster.serve.replica_kinds import resource_name
from cluster.settings.launch_settings import LaunchSettings
from protocol.roles import ROLES, Role

if TYPE_CHECKING:  # it imports Ray Serve, which nothing here needs
    from cluster.serve.applications import ReplicaLayout


def node_subject(
    node: RayNode, launch: LaunchSettings, layout: ReplicaLayout
) -> DoctorSubject | None:
    """Return the subject of the checks on ``node``; None for one that takes no replicas.

    It has as many workers as may come to run there. A node with room for workers needs the model's
    weights, any other one its tokenizer only."""
    gpus = int(node.resources.get("GPU", 0))
    wanted = {"prefill": launch.prefill, "decode": launch.decode}
    counts: dict[Role, int] = {role: min(_slots(node, role), wanted[role]) for role in ROLES}
    while layout.cuda and sum(counts.values()) > gpus:  # Ray gives each worker a GPU of its own
        counts[max(ROLES, key=lambda role: counts[role])] -= 1
    engines = {role: launch.workers[role].engine for role in ROLES}
    device = engines["decode"].device or ("cuda" if layout.cuda else "cpu")
    pools = [
        SubjectPool(role, count, replace(engines[role], device=device))
        for role, count in counts.items()
        if count
    ]
    if not pools and not node.takes("router"):
        return None
    return DoctorSubject(
        kind="worker" if pools else "router",
        model=launch.model_path or None,
        cluster=launch.cluster,
        pools=tuple(pools),
        gpus=gpus,
    )


def _slots(node: RayNode, role: Role) -> int:
    return int(node.resources.get(resource_name(role), 0))
