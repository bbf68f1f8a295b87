"""Looks at the nodes of a Ray cluster: which replicas they take, and which program they have.

``external_cluster`` calls it before it deploys.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any, NamedTuple

from cluster.local.start_report import ReportWaiting, WaitReporter
from cluster.serve.node_settings import program_fingerprint
from cluster.serve.replica_kinds import ReplicaKind, resource_name
from protocol.errors import StartupError

_POLL_S = 0.5
_ANSWER_S = 60.0  # time for a node to start a process and read the program


class RayNode(NamedTuple):
    id: str
    address: str
    resources: dict[str, float]

    def takes(self, kind: ReplicaKind) -> bool:
        return self.resources.get(resource_name(kind), 0) >= 1


def living_nodes() -> list[RayNode]:
    import ray

    listed: Any = ray.nodes
    return [
        RayNode(node["NodeID"], node["NodeManagerAddress"], node["Resources"])
        for node in listed()
        if node["Alive"]
    ]


def wait_for_nodes(
    kinds: Collection[ReplicaKind], deadline_s: float, report: ReportWaiting
) -> list[RayNode]:
    """Return all nodes once one takes each of ``kinds``. Raises StartupError at the deadline."""
    end = time.monotonic() + deadline_s
    wait_reporter = WaitReporter(report, end)
    while True:
        nodes = living_nodes()
        absent = [kind for kind in kinds if not any(node.takes(kind) for node in nodes)]
        if not absent:
            return nodes
        if time.monotonic() > end:
            names = ", ".join(resource_name(kind) for kind in absent)
            raise StartupError(
                f"no node declares {names} after {deadline_s:.0f} s, so that it cannot be told"
                " whether there are GPUs: start such a node, or set worker.device"
            )
        wait_reporter([f"a node with {resource_name(kind)}" for kind in absent])
        time.sleep(_POLL_S)


def check_same_program(nodes: list[RayNode], program: str) -> None:
    """Raise StartupError if a node that takes Baton's replicas has another program."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask: Any = ray.remote(num_cpus=0, max_retries=0)(program_fingerprint)
    ours = [node for node in nodes if any(name.startswith("baton_") for name in node.resources)]
    places = [NodeAffinitySchedulingStrategy(node.id, soft=False) for node in ours]
    answers = [ask.options(scheduling_strategy=place).remote() for place in places]
    end = time.monotonic() + _ANSWER_S
    for node, answer in zip(ours, answers, strict=True):
        try:
            found = ray.get(answer, timeout=max(0.1, end - time.monotonic()))
        except Exception as error:  # any type: the other node's exception, or Ray's own
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise StartupError(f"the node {node.address} has no Baton: {reason[-1]}") from None
        if found != program:
            raise StartupError(
                f"the node {node.address} has another version of Baton than this one: bring the"
                " same to all nodes, and deploy again; nothing was changed"
            )
