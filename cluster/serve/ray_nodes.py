"""Looks at the nodes of a Ray cluster: which replicas they take, and which program they have.

``external_cluster`` calls it before it deploys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from cluster.local.start_report import ReportWaiting, WaitReporter
from cluster.serve.node_settings import program_fingerprint
from cluster.serve.replica_kinds import ReplicaKind, resource_name
from protocol.errors import StartupError

_POLL_S = 0.5
_ANSWER_S = 60.0  # time for a node to start a process and read the program

Asked = TypeVar("Asked")
Said = TypeVar("Said")


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
                f"no node declares {names} after {deadline_s:.0f} s, so it is unknown whether"
                " there are GPUs: start such a node, or set worker.device"
            )
        wait_reporter([f"a node with {resource_name(kind)}" for kind in absent])
        time.sleep(_POLL_S)


class NodeTasks(Generic[Asked, Said]):
    """A generator function that runs on several nodes, once on each, and what it yields there.

    ``work`` must be importable on the nodes. The tasks end with the process that made them."""

    def __init__(
        self, work: Callable[[Asked], Iterator[Said]], asked: Sequence[tuple[RayNode, Asked]]
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        run: Any = ray.remote(num_cpus=0, max_retries=0, num_returns="streaming")(work)
        self._running: dict[Any, str] = {}
        for node, argument in asked:
            place = NodeAffinitySchedulingStrategy(node.id, soft=False)
            made = run.options(scheduling_strategy=place).remote(argument)
            self._running[made] = node.address

    @property
    def pending(self) -> list[str]:
        """The addresses of the nodes on which it still runs."""
        return list(self._running.values())

    def poll(self, timeout_s: float) -> list[tuple[str, Said]]:
        """Return what nodes have yielded, at most one value each; wait ``timeout_s`` for the first.

        Raises StartupError for a task that fails."""
        import ray

        said: list[tuple[str, Said]] = []
        wait: Any = ray.wait  # its types do not know generators
        ready, _ = wait(list(self._running), num_returns=1, timeout=timeout_s)
        for stream in ready:
            address = self._running[stream]
            try:
                value: Any = ray.get(next(stream))
                said.append((address, value))
            except StopIteration:
                del self._running[stream]
            except Exception as error:  # any type: the other node's exception, or Ray's own
                raise StartupError(f"the node {address}: {_last_line(error)}") from None
        return said


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


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
            text = f"the node {node.address} has no Baton: {_last_line(error)}"
            raise StartupError(text) from None
        if found != program:
            raise StartupError(
                f"the node {node.address} has another version of Baton than this one: copy the"
                " same version to all nodes, and deploy again; nothing was changed"
            )
