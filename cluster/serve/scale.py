"""`baton scale`: changes the replica counts of a running cluster; replicas that stay go on.

Ray reads its environment when it is imported, so functions import it once ``_connected`` has set
that environment.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from cluster.local.run_state import ClusterHome
from cluster.local.start_report import ReportWaiting, StartReporter, WaitReporter
from cluster.serve import ray_runtime
from cluster.serve.replica_kinds import SCALABLE_KINDS, ReplicaKind, application_name
from protocol.errors import StartupError
from protocol.roles import ROLES

MAX_REPLICAS = 10_000
_POLL_S = 0.1
_NAMES: dict[str, ReplicaKind] = {"prefill": "prefill", "decode": "decode", "routers": "router"}


def parse_replica_counts(words: Sequence[str]) -> dict[ReplicaKind, int]:
    """Parse ``["prefill=3", "decode=5"]``. Raises StartupError for anything else."""
    counts: dict[ReplicaKind, int] = {}
    for word in words:
        name, _, number = word.partition("=")
        kind = _NAMES.get(name)
        if kind is None or not number.isascii() or not number.isdigit():
            expected = " ".join(f"{each}=N" for each in _NAMES)
            raise StartupError(f"{word!r}: expected one or more of {expected}")
        if kind in counts:
            raise StartupError(f"{name} is given twice")
        if not 1 <= int(number) <= MAX_REPLICAS:
            raise StartupError(f"{word!r}: expected a number from 1 to {MAX_REPLICAS}")
        counts[kind] = int(number)
    return counts


def scale_cluster(
    cluster: str, counts: dict[ReplicaKind, int], address: str | None, deadline_s: float
) -> str:
    """Set the counts, and return a line with old and new counts when the replicas run.

    ``address``: a Ray cluster; None: the cluster of this name on this machine. Raises
    StartupError."""
    with _connected(cluster, address), StartReporter() as report:
        before = set_replicas(counts, deadline_s, report)
    changes = [f"{k} {before[k]} -> {counts[k]}" for k in SCALABLE_KINDS if k in counts]
    return ", ".join(changes)


def _connected(cluster: str, address: str | None) -> AbstractContextManager[None]:
    if address is not None:
        return ray_runtime.connected_to_ray(address)
    state = ClusterHome(cluster).read()
    if state is None or not state.ready or state.ray_address is None:
        raise StartupError(
            f"no cluster {cluster!r} of this user serves on this machine; one on other hosts is"
            " named by --address"
        )
    ray_runtime.join_environment(Path(state.run_dir))
    return ray_runtime.connected_to_ray(state.ray_address)


def set_replicas(
    counts: dict[ReplicaKind, int], deadline_s: float, report: ReportWaiting
) -> dict[ReplicaKind, int]:
    """Set replica counts, wait until the replicas run, and return the counts from before.

    Raises StartupError for a kind that is not deployed or that an autoscaler controls, and at the
    deadline."""
    from cluster.serve import deploy, ray_internals

    _check_not_autoscaled(counts)
    before = deploy.running_replicas()
    absent = [kind for kind in counts if kind not in before]
    if absent:
        raise StartupError(
            f"the cluster runs no {absent[0]} replicas that could be scaled; it runs "
            + (", ".join(f"{count} {kind}" for kind, count in before.items()) or "none at all")
        )
    for kind, count in counts.items():
        ray_internals.set_target_replicas(kind, count, deadline_s)
    _wait_for(counts, deadline_s, report)
    return {kind: before[kind] for kind in counts}


def _check_not_autoscaled(kinds: Collection[ReplicaKind]) -> None:
    from cluster.serve import deploy

    pools = [kind for kind in ROLES if kind in kinds]
    if pools and deploy.is_autoscaler_acting():
        raise StartupError(
            f"the autoscaler sets the number of {' and '.join(pools)} workers (autoscaler.mode is"
            " act); change its limits, as autoscaler.decode_min, or turn it to advise, and deploy"
            " again; routers=N can be scaled"
        )


def _failure_reasons(kinds: Sequence[ReplicaKind]) -> list[str]:
    """Return the errors of replicas that fail to start."""
    from ray import serve

    from cluster.serve import deploy

    applications = serve.status().applications
    found = [applications[name] for name in map(application_name, kinds) if name in applications]
    return [
        deploy.failure_reason(overview)
        for overview in found
        if any("failed to start" in each.message for each in overview.deployments.values())
    ]


def _wait_for(counts: dict[ReplicaKind, int], deadline_s: float, report: ReportWaiting) -> None:
    from cluster.serve import deploy

    end = time.monotonic() + deadline_s
    wait_reporter = WaitReporter(report, end)
    while True:
        running = deploy.running_replicas()
        waiting: list[ReplicaKind] = [k for k, n in counts.items() if running.get(k, 0) != n]
        if not waiting:
            return
        if time.monotonic() > end:
            shown = ", ".join(f"{running.get(k, 0)} of {counts[k]} {k}" for k in waiting)
            reasons = "".join(f"; {reason}" for reason in _failure_reasons(waiting))
            why = deploy.declared_slots(waiting) + reasons
            raise StartupError(f"after {deadline_s:.0f} s {shown} run{why}")
        wait_reporter(waiting)
        time.sleep(_POLL_S)
