"""The nodes of a Ray cluster: what they take, and whether they have the same program."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any, NamedTuple

from cluster.serve.deploy import Say, Telling
from cluster.serve.node import fingerprint
from cluster.serve.replica_kinds import Kind, resource
from protocol.errors import StartupError

_POLL_S = 0.5
_ANSWER_S = 60.0  # for a node to start a process and read the program


class Node(NamedTuple):
    id: str
    address: str
    resources: dict[str, float]

    def takes(self, kind: Kind) -> bool:
        return self.resources.get(resource(kind), 0) >= 1


def nodes() -> list[Node]:
    """Those that live."""
    import ray

    listed: Any = ray.nodes
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"])
        for node in listed()
        if node["Alive"]
    ]


def wait_for(kinds: Collection[Kind], deadline_s: float, say: Say) -> list[Node]:
    """The nodes, once there is one for each kind. Raises StartupError at the deadline."""
    end = time.monotonic() + deadline_s
    tell = Telling(say, end)
    while True:
        there = nodes()
        absent = [kind for kind in kinds if not any(node.takes(kind) for node in there)]
        if not absent:
            return there
        if time.monotonic() > end:
            names = ", ".join(resource(kind) for kind in absent)
            raise StartupError(
                f"no node declares {names} after {deadline_s:.0f} s, so that it cannot be told"
                " whether there are GPUs: start such a node, or set worker.device"
            )
        tell([f"a node with {resource(kind)}" for kind in absent])
        time.sleep(_POLL_S)


def check_programs(there: list[Node], program: str) -> None:
    """Raises StartupError where a node that takes anything of Baton has another one."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask: Any = ray.remote(num_cpus=0, max_retries=0)(fingerprint)
    ours = [node for node in there if any(name.startswith("baton_") for name in node.resources)]
    places = [NodeAffinitySchedulingStrategy(node.id, soft=False) for node in ours]
    asked = [ask.options(scheduling_strategy=place).remote() for place in places]
    end = time.monotonic() + _ANSWER_S
    for node, answer in zip(ours, asked, strict=True):
        try:
            found = ray.get(answer, timeout=max(0.1, end - time.monotonic()))
        except Exception as error:  # of any kind: what the other node raised, or Ray itself
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise StartupError(f"the node {node.address} has no Baton: {reason[-1]}") from None
        if found != program:
            raise StartupError(
                f"the node {node.address} has another version of Baton than this one: bring the"
                " same to all nodes, and deploy again; nothing was changed"
            )
