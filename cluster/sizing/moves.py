"""From what is there to what is wanted: loans first, then starts; stops when neither. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from cluster.sizing import memory as memories
from cluster.sizing.decision import Loan
from cluster.sizing.snapshot import Counts, Limits, Memory, Mix, Snapshot
from cluster.sizing.worker_counts import gpus_each, here, home_to_shrink, may_go, room, starting
from protocol.roles import ROLES, Role

# MERGED cluster.sizing.fitting
# Numbers of workers within limits and a budget of GPUs. Pure.


def fit(wanted: Counts, limits: Limits, gpus: float = 1.0) -> Counts:
    """``wanted`` within the limits of each role. Where the budget does not pay for both (``gpus``:
    of a worker), the pair that maximises min(P/P*, D/D*): the role that is served worst is served
    as well as can be. The least numbers hold in any case."""
    least, most = limits.least, limits.most
    prefill = max(least.prefill, min(wanted.prefill, most.prefill))
    decode = max(least.decode, min(wanted.decode, most.decode))
    if limits.gpus is None or (prefill + decode) * gpus <= limits.gpus:
        return Counts(prefill=prefill, decode=decode)
    room = int(limits.gpus / gpus)

    def served(p: int) -> tuple[float, float]:
        d = min(decode, room - p)
        shares = (p / max(1, prefill), d / max(1, decode))
        return min(shares), max(shares)

    fewest, largest = least.prefill, max(least.prefill, min(prefill, room - least.decode))
    best = max(range(fewest, largest + 1), key=served)
    return Counts(prefill=best, decode=max(least.decode, min(decode, room - best)))


OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}


class Moves(NamedTuple):
    """What is to be done. ``targets``: by home; ``unmet``: workers that limits or the budget do not
    allow."""

    targets: dict[Role, int]
    loans: tuple[Loan, ...]
    started: int = 0
    stopped: int = 0
    unmet: int = 0


def moves(snapshot: Snapshot, mix: Mix, memory: Memory, wanted: Counts) -> Moves:
    """``wanted``: before limits."""
    target = fitted(wanted, snapshot)
    loans = _loans(snapshot, mix, memory, target)
    targets, started, unmet = _starts(snapshot, mix, wanted, target, loans)
    if loans or started or not _may_stop(snapshot, memory):
        return Moves(targets, loans, started=started, unmet=unmet)
    stopped = _stop(snapshot, mix, memory, target, targets)
    return Moves(targets, loans, stopped=stopped, unmet=unmet)


def fitted(wanted: Counts, snapshot: Snapshot) -> Counts:
    return fit(wanted, snapshot.limits, gpus_each(snapshot))


def _loans(snapshot: Snapshot, mix: Mix, memory: Memory, target: Counts) -> tuple[Loan, ...]:
    """What one role lacks and the other has over its largest demand of late. Who is there counts,
    not who starts: a loan is quicker."""
    tuning = snapshot.tuning
    if not tuning.loans:
        return ()
    there = here(snapshot, mix)
    if target.decode and not there.decode:  # decode workers serve alone, prefill workers do not
        return _lent(snapshot, "decode", 1)
    known_s = memories.known_s(tuning, mix)  # at the start too little is known to lend by
    if not memories.covers(memory, snapshot.at_s, known_s):
        return ()
    keep = fitted(memories.largest(memory, snapshot.at_s, tuning.lend_after_s), snapshot)
    loans: tuple[Loan, ...] = ()
    for role in ROLES:
        donor = OTHER[role]
        spare = there.of(donor) - max(keep.of(donor), target.of(donor))
        loans += _lent(snapshot, role, min(target.of(role) - there.of(role), spare))
    return loans


def _lent(snapshot: Snapshot, role: Role, count: int) -> tuple[Loan, ...]:
    """At most ``count`` workers of the other role: those that are lent go home first, then those
    with the least KV to hand over."""
    donors = [w for w in snapshot.workers if w.role != role and w.state == "serving"]
    donors.sort(key=lambda w: (w.home != role, w.kv_tokens, w.instance))
    return tuple(Loan(instance=w.instance, role=role) for w in donors[: max(0, count)])


def _starts(
    snapshot: Snapshot, mix: Mix, wanted: Counts, target: Counts, loans: tuple[Loan, ...]
) -> tuple[dict[Role, int], int, int]:
    """Targets by home, how many start, and how many would if they might. What loans replace is no
    longer started."""
    there, coming = here(snapshot, mix), starting(snapshot)
    targets: dict[Role, int] = {role: snapshot.targets.of(role) for role in ROLES}
    lent = {role: sum(loan.role == role for loan in loans) for role in ROLES}
    short: dict[Role, int] = {}
    for role in ROLES:
        have = there.of(role) + lent[role]  # a donor's own role has them to spare
        spared = min(coming.of(role), lent[role], max(0, have + coming.of(role) - target.of(role)))
        spared = may_go(snapshot, target, role, spared)
        targets[role] -= spared
        short[role] = max(0, target.of(role) - have - coming.of(role) + spared)
    left = room(snapshot)
    started = 0
    for role in sorted(ROLES, key=lambda r: -short[r]):
        more = int(min(short[role], left - started))
        targets[role] += more
        started += more
    denied = sum(max(0, wanted.of(r) - target.of(r)) for r in ROLES)
    return targets, started, sum(short.values()) - started + denied


def _may_stop(snapshot: Snapshot, memory: Memory) -> bool:
    tuning, at_s = snapshot.tuning, snapshot.at_s
    if not memories.covers(memory, at_s, memories.down_s(tuning)):
        return False
    return memory.last_down_s is None or at_s - memory.last_down_s >= tuning.down_every_s


def _stop(
    snapshot: Snapshot, mix: Mix, memory: Memory, target: Counts, targets: dict[Role, int]
) -> int:
    """Lowers ``targets`` by a step of each role that has more than its largest demand of long;
    returns by how many in all."""
    tuning = snapshot.tuning
    floor = fitted(memories.largest(memory, snapshot.at_s, memories.down_s(tuning)), snapshot)
    there, coming = here(snapshot, mix), starting(snapshot)
    stopped = 0
    for role in ROLES:
        have = there.of(role) + coming.of(role)
        over = have - max(floor.of(role), target.of(role))
        if over > 0:
            home = home_to_shrink(snapshot, role)
            step = min(over, max(1, math.floor(tuning.down_share * have)), targets[home])
            step = may_go(snapshot, target, home, step)
            targets[home] -= step
            stopped += step
    return stopped
