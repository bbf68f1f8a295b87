"""Counts of running and starting workers per pool. Pure."""

from __future__ import annotations

import math

from cluster.sizing.predict import relative_speed
from cluster.sizing.snapshot import RequestMix, RoleValues, SizingSnapshot, WorkerCounts, staying
from protocol.roles import ROLES, Role


def count_starting(snapshot: SizingSnapshot) -> WorkerCounts:
    """Return the workers that were asked for and are not registered, by home."""
    workers = staying(snapshot.workers)
    counts = {r: max(0, snapshot.targets.of(r) - sum(w.home == r for w in workers)) for r in ROLES}
    return WorkerCounts(**counts)


def count_present(snapshot: SizingSnapshot) -> WorkerCounts:
    """Return the workers by role: those that serve it or will, and those that start."""
    workers = staying(snapshot.workers)
    starting = count_starting(snapshot)
    counts = {r: sum(w.role == r for w in workers) + starting.of(r) for r in ROLES}
    return WorkerCounts(**counts)


def speed_in_role(snapshot: SizingSnapshot, mix: RequestMix, role: Role, home: Role) -> float:
    """Return the workers of ``role``'s own pool that a worker of the pool ``home`` replaces."""
    return relative_speed(role, home, mix, snapshot.machines, snapshot.goals)


def effective_workers(snapshot: SizingSnapshot, mix: RequestMix, *, serving: bool) -> RoleValues:
    """Return the registered workers by role, in workers of the role's own pool, since a lent worker
    may be a different machine. ``serving``: without those that warm up or change their role."""
    totals = dict.fromkeys(ROLES, 0.0)
    for worker in snapshot.workers:
        if worker.state == "leaving" or (serving and worker.state != "serving"):
            continue
        totals[worker.role] += speed_in_role(snapshot, mix, worker.role, worker.home)
    return RoleValues(**totals)


def registered_workers(snapshot: SizingSnapshot, mix: RequestMix) -> WorkerCounts:
    """Return ``effective_workers`` of all registered workers, rounded; at least one where there is
    any."""
    found = effective_workers(snapshot, mix, serving=False)
    return WorkerCounts(**{r: max(math.ceil(found.of(r) > 0), round(found.of(r))) for r in ROLES})


def gpus_per_worker(snapshot: SizingSnapshot) -> float:
    """Return the most GPUs that any worker has."""
    return max((w.gpus for w in snapshot.workers), default=1.0)


def affordable_workers(snapshot: SizingSnapshot) -> float:
    """Return for how many more workers the GPU budget pays. A leaving worker holds its GPU until it
    is gone."""
    gpus, each = snapshot.limits.gpus, gpus_per_worker(snapshot)
    if gpus is None or each <= 0:
        return math.inf
    held = len(snapshot.workers) + count_starting(snapshot).total
    return max(0, int(gpus / each) - held)


def pool_to_shrink(snapshot: SizingSnapshot, role: Role) -> Role:
    """Return the pool of which the largest share serves ``role``: the caller cannot choose which of
    a pool's workers stops."""

    def share(home: Role) -> tuple[float, bool]:
        workers = [w for w in staying(snapshot.workers) if w.home == home]
        return (
            sum(w.role == role for w in workers) / len(workers) if workers else 0.0
        ), home == role

    return max(ROLES, key=share)


def removable_workers(
    snapshot: SizingSnapshot, target: WorkerCounts, home: Role, count: int
) -> int:
    """Return how many of ``count`` workers of a pool may stop, whichever they are. A role that is
    wanted keeps one registered worker: a starting worker serves no request yet, and is not always
    stopped first."""
    workers = staying(snapshot.workers)
    for role in ROLES:
        serving = sum(w.role == role for w in workers)
        of_home = sum(w.role == role and w.home == home for w in workers)
        if of_home and target.of(role) and min(count, of_home) >= serving:
            count = max(0, serving - 1)
    return count
