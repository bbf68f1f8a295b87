"""`baton scale`: changes the replica counts of a running cluster; replicas that stay go on.

    check what fits --> confirm a large jump --> set the counts --> wait until the replicas run
                                                                     └── deadline or Ctrl-C: the
                                                        replicas that do not run yet are withdrawn

Every call of Serve has a deadline. A later `baton scale` overtakes one that waits: that one sees
other counts than its own, and ends. Ray reads its environment when it is imported, so functions
import it once ``_connected`` has set that environment.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TypeAlias

from cluster.local.run_state import ClusterHome, RunState, others_text
from cluster.local.start_report import ReportWaiting, StartReporter, WaitReporter
from cluster.serve import ray_runtime
from cluster.serve.bounded_call import CONTROLLER_S, call_within
from cluster.serve.replica_kinds import (
    SCALABLE_KINDS,
    ReplicaKind,
    application_name,
    option_name,
    resource_name,
)
from cluster.serve.scale_limits import MemoryRoom, NodeRoom, find_large_jumps, find_shortages
from protocol.errors import StartupError, UsageError
from protocol.roles import ROLES

MAX_REPLICAS = 10_000
_SHOWN_CHARS = 40  # of a word that is refused
_POLL_S = 0.25
_NAMES: dict[str, ReplicaKind] = {option_name(kind): kind for kind in SCALABLE_KINDS}

Confirm: TypeAlias = Callable[[str], bool]
"""Asks the user about large jumps, which the text describes."""
Measure: TypeAlias = Callable[[Path], MemoryRoom | None]
"""Returns the memory for more replicas on this machine; the path is the folder of the run."""


def parse_replica_counts(words: Sequence[str]) -> dict[ReplicaKind, int]:
    """Parse ``["prefill=3", "decode=5"]``. Raises UsageError for anything else."""
    counts: dict[ReplicaKind, int] = {}
    for word in words:
        name, equals, number = word.partition("=")
        kind = _NAMES.get(name)
        shown = repr(word if len(word) <= _SHOWN_CHARS else word[:_SHOWN_CHARS] + "...")
        if kind is None or not equals:
            near = difflib.get_close_matches(name, _NAMES, n=1)
            meant = f"; did you mean {near[0]}={number or 'N'}?" if near and not kind else ""
            expected = " ".join(f"{each}=N" for each in _NAMES)
            raise UsageError(f"{shown}: expected one or more of {expected}{meant}")
        if kind in counts:
            raise UsageError(f"{name} is given twice")
        is_number = number.isascii() and number.isdigit() and len(number) <= len(str(MAX_REPLICAS))
        if not is_number or not 1 <= int(number) <= MAX_REPLICAS:
            raise UsageError(f"{shown}: expected a number from 1 to {MAX_REPLICAS}")
        counts[kind] = int(number)
    return counts


def scale_cluster(
    cluster: str,
    counts: dict[ReplicaKind, int],
    address: str | None,
    deadline_s: float,
    measure: Measure,
    confirm: Confirm,
) -> str:
    """Set the counts, and return a line with old and new counts when the replicas run.

    ``address``: a Ray cluster; None: the cluster of this name on this machine. Raises StartupError
    for counts that do not fit, for a large jump that is not confirmed, and at the deadline."""
    state = None if address is not None else _local_state(cluster)
    room = None if state is None else partial(measure, Path(state.run_dir))
    with _connected(state, address), StartReporter() as report:
        before = _check(counts, room, confirm)
        set_replicas(counts, before, deadline_s, report)
    return ", ".join(_change_text(k, before[k], counts[k]) for k in SCALABLE_KINDS if k in counts)


def _change_text(kind: ReplicaKind, before: int, count: int) -> str:
    return f"{kind} {count} (unchanged)" if before == count else f"{kind} {before} -> {count}"


def _local_state(cluster: str) -> RunState:
    home = ClusterHome(cluster)
    state = home.read() if home.running() else None
    if state is None or not state.ready or state.ray_address is None:
        raise StartupError(
            f"no cluster {cluster!r} of this user serves on this machine{others_text(cluster)};"
            " --address names a Ray cluster of several hosts"
        )
    return state


def _connected(state: RunState | None, address: str | None) -> AbstractContextManager[None]:
    if state is None:
        return ray_runtime.connected_to_ray(address or "auto")
    assert state.ray_address is not None  # ``_local_state`` has checked it
    ray_runtime.join_environment(Path(state.run_dir))
    return ray_runtime.connected_to_ray(state.ray_address)


def _check(
    counts: Mapping[ReplicaKind, int],
    measure: Callable[[], MemoryRoom | None] | None,
    confirm: Confirm,
) -> dict[ReplicaKind, int]:
    """Return the numbers of running replicas. Raises StartupError for counts that cannot be set.

    ``measure``: None where the cluster's hosts are others than this machine."""
    from cluster.serve import deploy, ray_internals

    _check_not_autoscaled(counts)
    before = deploy.running_replicas()
    absent = [kind for kind in counts if kind not in before]
    if absent:
        raise StartupError(
            f"the cluster runs no {absent[0]} replicas that could be scaled; it runs "
            + (", ".join(f"{count} {kind}" for kind, count in before.items()) or "none at all")
        )
    gpus = call_within(CONTROLLER_S, "Ray Serve", lambda: ray_internals.worker_gpus(CONTROLLER_S))
    check_room(before, counts, gpus, measure)
    confirm_large_jumps(before, counts, confirm)
    return before


def check_room(
    before: Mapping[ReplicaKind, int],
    counts: Mapping[ReplicaKind, int],
    gpus_each: float,
    measure: Callable[[], MemoryRoom | None] | None,
) -> None:
    """Raise StartupError, which names all that is missing, where the nodes lack room for replicas
    beyond ``before``. `baton scale` and a `baton up` that updates a cluster call it.

    ``gpus_each``: GPUs of a worker. ``measure``: None where the hosts are others than this one."""
    grows = any(count > before.get(kind, 0) for kind, count in counts.items())
    if not grows or (measure is None and _has_node_autoscaler()):
        return
    memory = None if measure is None else measure()
    nodes = call_within(CONTROLLER_S, "Ray", _nodes)
    if short := find_shortages(before, counts, nodes, gpus_each, memory):
        raise StartupError("; ".join(short) + "; nothing was changed")


def confirm_large_jumps(
    before: Mapping[ReplicaKind, int], counts: Mapping[ReplicaKind, int], confirm: Confirm
) -> None:
    """Ask about all large jumps at once. Raises StartupError where the answer is no."""
    large = find_large_jumps(before, counts)
    shown = [f"{option_name(kind)}: {before.get(kind, 0)} -> {counts[kind]}" for kind in large]
    if large and not confirm(", ".join(shown)):
        raise StartupError("nothing was changed")


def _has_node_autoscaler() -> bool:
    """Return whether more nodes may come, so that what present ones lack says nothing."""
    from cluster.serve import ray_internals

    return call_within(CONTROLLER_S, "Ray", ray_internals.has_node_autoscaler)


def _nodes() -> list[NodeRoom]:
    from cluster.serve import ray_nodes

    return [
        NodeRoom(
            {kind: node.resources.get(resource_name(kind), 0) for kind in SCALABLE_KINDS},
            node.resources.get("GPU", 0),
        )
        for node in ray_nodes.living_nodes()
    ]


def set_replicas(
    counts: dict[ReplicaKind, int],
    before: Mapping[ReplicaKind, int],
    deadline_s: float,
    report: ReportWaiting,
) -> None:
    """Set replica counts, and wait until the replicas run. ``before``: those that run now.

    Where they do not run at the deadline, or at Ctrl-C, those that have not started are withdrawn.
    Raises StartupError then, and where another command has set other counts meanwhile."""
    from cluster.serve import deploy

    requested = deploy.target_replicas()
    try:
        # Fewer first: what goes makes room for what comes.
        for kind in sorted(counts, key=lambda each: counts[each] - before[each]):
            deploy.set_target_replicas(kind, counts[kind])
        _wait_for(counts, deadline_s, report)
    except (StartupError, KeyboardInterrupt) as error:
        least = {k: max(before[k], min(requested.get(k, 0), n)) for k, n in counts.items()}
        kept = _withdraw_unstarted(counts, {k: n for k, n in least.items() if counts[k] > n})
        reason = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
        raise StartupError(f"{reason}{kept}") from None


def _withdraw_unstarted(counts: Mapping[ReplicaKind, int], least: Mapping[ReplicaKind, int]) -> str:
    """Set the targets of the kinds of ``least`` to the replicas that run, at least to that number;
    return a clause about it. Targets that another command has set are left alone."""
    from cluster.serve import deploy

    targets, running = deploy.target_replicas(), deploy.running_replicas()
    kept = []
    for kind, number in least.items():
        count = min(counts[kind], max(number, running.get(kind, 0)))
        if targets.get(kind) == counts[kind] and count < counts[kind]:
            deploy.set_target_replicas(kind, count)
            kept.append(f"{option_name(kind)}={count}")
    return f"; the others are withdrawn, and {' '.join(kept)} stays" if kept else ""


def _check_not_autoscaled(kinds: Collection[ReplicaKind]) -> None:
    from cluster.serve import deploy

    pools = [kind for kind in ROLES if kind in kinds]
    if pools and deploy.is_autoscaler_acting():
        raise StartupError(
            f"the autoscaler sets the number of {' and '.join(pools)} workers (autoscaler.mode is"
            " act); change its limits, such as autoscaler.decode_min, or set it to advise, and"
            " deploy again; routers=N can be scaled"
        )


def _failure_reasons(kinds: Sequence[ReplicaKind]) -> list[str]:
    """Return the errors of replicas that fail to start."""
    from cluster.serve import deploy

    applications = deploy.serve_applications()
    found = [applications[name] for name in map(application_name, kinds) if name in applications]
    return [
        deploy.failure_reason(overview)
        for overview in found
        if any("failed to start" in each.message for each in overview.deployments.values())
    ]


def _wait_for(counts: dict[ReplicaKind, int], deadline_s: float, report: ReportWaiting) -> None:
    from cluster.serve import deploy

    end = time.monotonic() + deadline_s
    wait_reporter, failed_starts = WaitReporter(report, end), deploy.FailedStarts()
    while True:
        left_s = max(CONTROLLER_S, end - time.monotonic())
        targets, applications = deploy.target_replicas(left_s), deploy.serve_applications(left_s)
        running = deploy.count_running(applications)
        for kind, count in counts.items():
            if (target := targets.get(kind, count)) != count:
                raise StartupError(
                    f"another command has set {option_name(kind)}={target} in the meantime"
                )
        waiting: list[ReplicaKind] = [k for k, n in counts.items() if running.get(k, 0) != n]
        if not waiting:
            return
        for kind in waiting:
            if (overview := applications.get(application_name(kind))) is not None:
                failed_starts.check(kind, overview)
        if time.monotonic() > end:
            shown = ", ".join(f"{running.get(k, 0)} of {counts[k]} {k}" for k in waiting)
            reasons = "".join(f"; {reason}" for reason in _failure_reasons(waiting))
            why = deploy.declared_slots(waiting) + reasons
            raise StartupError(f"after {deadline_s:.0f} s {shown} run{why}")
        wait_reporter(waiting)
        time.sleep(_POLL_S)
