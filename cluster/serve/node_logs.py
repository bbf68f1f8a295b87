"""Reads the logs of replicas on the nodes of a Ray cluster, for `baton logs --address`.

A task on each node reads the files there. Ray's own API for logs (`ray logs`) needs its dashboard,
which a cluster of Baton does not start.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from cluster.local.kept_logs import find_replica_logs
from cluster.local.log_tail import LogFiles, LogTail, match_logs, unknown_source_text
from cluster.serve import ray_nodes, ray_runtime
from cluster.serve.bounded_call import CONTROLLER_S, call_within
from protocol.errors import StartupError, UsageError

_FIRST_LINES_S = 60.0  # time for a node to start a process and read the logs
_POLL_S = 0.5
_FOLLOW_S = 1.0


class LogQuery(msgspec.Struct, frozen=True):
    """``source``: as of ``match_logs``. ``lines``: the last ones of each log. ``follow``: then all
    that are appended."""

    source: str | None
    lines: int
    follow: bool = False


class NodeLines(msgspec.Struct, frozen=True):
    """Lines of one node's logs by their names. ``names``: the logs that the node has, in its first
    answer."""

    lines: dict[str, list[bytes]]
    names: tuple[str, ...] = ()


def read_logs(query: LogQuery) -> Iterator[tuple[str, NodeLines]]:
    """Yield what the nodes answer, with the address of the node; for ever if ``follow`` is set.

    This process must be connected to Ray. Raises StartupError for nodes that fail or do not answer,
    or that have no logs, and UsageError for a source that none has."""
    nodes = call_within(CONTROLLER_S, "Ray", _nodes_with_logs)
    tasks = ray_nodes.NodeTasks(read_logs_here, [(node, query) for node in nodes])
    silent, end = {node.address for node in nodes}, time.monotonic() + _FIRST_LINES_S
    names: set[str] = set()
    matched = False
    while tasks.pending:
        for address, answer in tasks.poll(_POLL_S):
            silent.discard(address)
            names |= set(answer.names)
            matched |= bool(answer.lines)
            yield address, answer
        if silent and time.monotonic() > end:
            missing = ", ".join(sorted(silent))
            raise StartupError(f"no logs came from {missing} within {_FIRST_LINES_S:.0f} s")
    if not names:
        raise StartupError("no node of this Ray cluster has logs of Baton's replicas")
    if not matched:
        raise UsageError(unknown_source_text(query.source, names))


def _nodes_with_logs() -> list[ray_nodes.RayNode]:
    """Return this node and those that take replicas, one of each address."""
    here = ray_runtime.node_address()
    found = [
        node
        for node in ray_nodes.living_nodes()
        if node.address == here or any(name.startswith("baton_") for name in node.resources)
    ]
    return list({node.address: node for node in found}.values())


# ---- on the nodes -------------------------------------------------------------------------------


def read_logs_here(query: LogQuery) -> Iterator[NodeLines]:
    """Yield the last lines of this node's logs; with ``follow``, new lines until Ray ends it."""
    folder = _log_folder()

    def find() -> LogFiles:
        return match_logs(find_replica_logs(folder), query.source)

    tail = LogTail(find)
    yield NodeLines(tail.last_lines(query.lines), tuple(find_replica_logs(folder)))
    while query.follow:
        time.sleep(_FOLLOW_S)
        if lines := tail.new_lines():
            yield NodeLines(lines)


def _log_folder() -> Path:
    """Return the folder in which the Ray of this node writes its logs."""
    import ray

    context = ray.get_runtime_context()
    return Path(context.get_temp_dir()) / context.get_session_name() / "logs"
