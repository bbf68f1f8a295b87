"""Who is there, and who is about to be. Pure."""

from __future__ import annotations

import math

from cluster.sizing.predict import speed
from cluster.sizing.snapshot import Counts, Mix, Pair, Snapshot
from protocol.roles import ROLES, Role


def starting(snapshot: Snapshot) -> Counts:
    """Workers that were asked for and are not there, by home."""
    staying = [w for w in snapshot.workers if w.state != "leaving"]
    counts = {r: max(0, snapshot.targets.of(r) - sum(w.home == r for w in staying)) for r in ROLES}
    return Counts(**counts)


def present(snapshot: Snapshot) -> Counts:
    """Workers by role: those that serve it or are about to, and those that start."""
    staying = [w for w in snapshot.workers if w.state != "leaving"]
    coming = starting(snapshot)
    counts = {r: sum(w.role == r for w in staying) + coming.of(r) for r in ROLES}
    return Counts(**counts)


def strength(snapshot: Snapshot, mix: Mix, *, serving: bool) -> Pair:
    """Registered workers by role, in workers of the role's own pool: a lent one may be another
    machine. ``serving``: without those that are warming up or on their way to another role."""
    totals = dict.fromkeys(ROLES, 0.0)
    for worker in snapshot.workers:
        if worker.state == "leaving" or (serving and worker.state != "serving"):
            continue
        role, home = worker.role, worker.home
        totals[role] += speed(role, home, mix, snapshot.machines, snapshot.goals)
    return Pair(**totals)


def here(snapshot: Snapshot, mix: Mix) -> Counts:
    """``strength`` of those that are there, in whole workers: at least one where there is any."""
    found = strength(snapshot, mix, serving=False)
    return Counts(**{r: max(math.ceil(found.of(r) > 0), round(found.of(r))) for r in ROLES})


def gpus_each(snapshot: Snapshot) -> float:
    """GPUs of one worker: the most that any has."""
    return max((w.gpus for w in snapshot.workers), default=1.0)


def room(snapshot: Snapshot) -> float:
    """For how many more workers the budget pays. Who leaves holds a GPU until he is gone."""
    gpus, each = snapshot.limits.gpus, gpus_each(snapshot)
    if gpus is None or each <= 0:
        return math.inf
    held = len(snapshot.workers) + starting(snapshot).total
    return max(0, int(gpus / each) - held)


def home_to_shrink(snapshot: Snapshot, role: Role) -> Role:
    """The pool of which most serve ``role``: which worker of it goes is not ours to choose."""

    def share(home: Role) -> tuple[float, bool]:
        of = [w for w in snapshot.workers if w.home == home and w.state != "leaving"]
        return (sum(w.role == role for w in of) / len(of) if of else 0.0), home == role

    return max(ROLES, key=share)


def may_go(snapshot: Snapshot, target: Counts, home: Role, count: int) -> int:
    """Of ``count`` workers of a pool, how many may go, whoever they are. A role that is wanted
    keeps one that is there: what starts serves nobody yet, and is not always stopped first."""
    staying = [w for w in snapshot.workers if w.state != "leaving"]
    for role in ROLES:
        there = sum(w.role == role for w in staying)
        of_home = sum(w.role == role and w.home == home for w in staying)
        if of_home and target.of(role) and min(count, of_home) >= there:
            count = max(0, there - 1)
    return count
