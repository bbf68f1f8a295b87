"""The changes that lead from the workers that exist to those that are wanted. Pure.

Loans come first, then starts; workers are stopped only when there are neither.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from cluster.sizing.decision import Loan
from cluster.sizing.demand import machine_for_role
from cluster.sizing.memory import has_history, lacking_s, largest_demand, needed_lately
from cluster.sizing.snapshot import (
    PoolLimits,
    RequestMix,
    SizingMemory,
    SizingSnapshot,
    WorkerCounts,
    WorkerSnapshot,
)
from cluster.sizing.worker_counts import (
    affordable_workers,
    count_starting,
    effective_workers,
    gpus_per_worker,
    pool_to_shrink,
    registered_workers,
    removable_workers,
    speed_in_role,
)
from protocol.performance.step_model import StepModel
from protocol.roles import ROLES, Role

SMALL_DELAY = 0.1
"""Share of the TTFT objective by which prompts may wait longer, until it is known that a lack of
workers is no chance."""
ROLE_CHANGE_S = 1.0
"""Seconds until all routers know that a worker has another role."""


def fit_to_limits(wanted: WorkerCounts, limits: PoolLimits, gpus: float = 1.0) -> WorkerCounts:
    """Return ``wanted`` within the limits of each role.

    Where the budget does not pay for both roles (``gpus``: GPUs per worker), the pair maximises
    min(P/P*, D/D*), so that the worst-served role is served as well as possible. The least numbers
    hold in any case.
    """
    least, most = limits.least, limits.most
    prefill = max(least.prefill, min(wanted.prefill, most.prefill))
    decode = max(least.decode, min(wanted.decode, most.decode))
    if limits.gpus is None or (prefill + decode) * gpus <= limits.gpus:
        return WorkerCounts(prefill=prefill, decode=decode)
    budget = int(limits.gpus / gpus)

    def served(p: int) -> tuple[float, float]:
        d = min(decode, budget - p)
        shares = (p / max(1, prefill), d / max(1, decode))
        return min(shares), max(shares)

    fewest, largest = least.prefill, max(least.prefill, min(prefill, budget - least.decode))
    best = max(range(fewest, largest + 1), key=served)
    return WorkerCounts(prefill=best, decode=max(least.decode, min(decode, budget - best)))


OTHER_ROLE: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}


class ScalingActions(NamedTuple):
    """The actions of one decision. ``targets``: workers to ask for, by home. ``unmet``: workers
    that the limits or the budget do not allow."""

    targets: dict[Role, int]
    loans: tuple[Loan, ...]
    started: int = 0
    stopped: int = 0
    unmet: int = 0


def plan_actions(
    snapshot: SizingSnapshot,
    mix: RequestMix,
    memory: SizingMemory,
    wanted: WorkerCounts,
    lasting: WorkerCounts,
) -> ScalingActions:
    """Return the actions towards ``wanted``, the demand before limits; ``lasting`` are those that
    will be needed."""
    target = fit_to_snapshot(wanted, snapshot)
    loans = _loans(snapshot, mix, memory, target, fit_to_snapshot(lasting, snapshot))
    needed = _demand_beyond_chance(snapshot, mix, memory, target)
    targets, started, denied = _starts(snapshot, mix, needed, loans)
    unmet = denied + sum(max(0, wanted.of(r) - target.of(r)) for r in ROLES)
    if loans or started or not _may_stop(snapshot, memory):
        return ScalingActions(targets, loans, started=started, unmet=unmet)
    stopped = _stop(snapshot, mix, memory, target, targets)
    return ScalingActions(targets, loans, stopped=stopped, unmet=unmet)


def fit_to_snapshot(wanted: WorkerCounts, snapshot: SizingSnapshot) -> WorkerCounts:
    return fit_to_limits(wanted, snapshot.limits, gpus_per_worker(snapshot))


def _loans(
    snapshot: SizingSnapshot,
    mix: RequestMix,
    memory: SizingMemory,
    target: WorkerCounts,
    lasting: WorkerCounts,
) -> tuple[Loan, ...]:
    """Return loans of what one role lacks and the other can spare, as far as they pay: the loan
    costs less than the start that it replaces, and the worker has been spare for as long as the
    loan costs, as in ``idle_limit_s``. Registered workers count, starting ones do not, because a
    loan is quicker. A donor counts for its own speed, and a role that is wanted keeps a worker that
    serves it."""
    tuning, at_s = snapshot.tuning, snapshot.at_s
    registered = registered_workers(snapshot, mix)
    exact = effective_workers(snapshot, mix, serving=False)
    loans: list[Loan] = []
    for role in ROLES if tuning.loans else ():
        donor = OTHER_ROLE[role]
        short, have = target.of(role) - registered.of(role), exact.of(donor)
        serving = sum(w.role == donor and w.state == "serving" for w in snapshot.workers)
        for worker in _donors(snapshot, role):
            if short <= 0:
                break
            left = have - speed_in_role(snapshot, mix, donor, worker.home)
            cost_s = loan_cost_s(snapshot, worker)
            recent = fit_to_snapshot(largest_demand(memory, at_s, cost_s), snapshot)
            spare = left >= max(recent.of(donor), target.of(donor), lasting.of(donor))
            is_last = serving == 1 and target.of(donor) > 0
            pays = cost_s < tuning.start_s and has_history(memory, at_s, cost_s)
            # decode workers can serve alone, prefill workers cannot
            alone = role == "decode" and not registered.decode and not loans
            if (spare and pays and not is_last) or alone:
                loans.append(Loan(instance=worker.instance, role=role))
                short, have, serving = short - 1, left, serving - 1
    return tuple(loans)


def _donors(snapshot: SizingSnapshot, role: Role) -> list[WorkerSnapshot]:
    """Return the workers that could take ``role``: those that are lent go home first, then those
    with the least KV. A worker of which a loan has just failed is left out, so that the next one is
    lent, or one is started."""
    failed = snapshot.failed_loans
    donors = [
        w
        for w in snapshot.workers
        if w.role != role and w.state == "serving" and w.instance not in failed
    ]
    return sorted(donors, key=lambda w: (w.home != role, w.kv_tokens, w.instance))


def loan_cost_s(snapshot: SizingSnapshot, worker: WorkerSnapshot) -> float:
    """Return the worker-seconds that a loan costs. Going or returning, a decode worker turns to
    prefill: it drains, and KV of requests that have not ended is computed again. The KV is that of
    ``worker``, or the mean of decode workers."""
    held = [w.kv_tokens for w in snapshot.workers if w.role == "decode"]
    kv = worker.kv_tokens if worker.role == "decode" else sum(held) / max(1, len(held))
    machine = machine_for_role("prefill", snapshot.machines)
    chunk_s = StepModel(*machine.step).prefill_s(0, machine.chunk, machine.chunk)
    return 2 * ROLE_CHANGE_S + snapshot.tuning.loan_drain_s + kv / machine.chunk * chunk_s


def _demand_beyond_chance(
    snapshot: SizingSnapshot, mix: RequestMix, memory: SizingMemory, target: WorkerCounts
) -> WorkerCounts:
    """Return ``target`` without workers of which the lack may be chance. While n of c are missing,
    waits grow by n/c seconds in each second: the n-th is asked for before that comes to SMALL_DELAY
    of the TTFT objective, and before a start would be over."""
    registered, starting = registered_workers(snapshot, mix), count_starting(snapshot)
    small_s = SMALL_DELAY * snapshot.goals.ttft_s

    def needed(role: Role) -> int:
        have = registered.of(role) + starting.of(role)
        for missing in range(target.of(role) - have, 0, -1):
            within_s = min(snapshot.tuning.start_s, small_s * have / missing)
            least = snapshot.limits.least.of(role)  # is needed whatever the demand is
            if have + missing <= least or lacking_s(memory, role, have + missing) > within_s:
                return have + missing
        return min(target.of(role), have)

    return WorkerCounts(**{role: needed(role) for role in ROLES})


def _starts(
    snapshot: SizingSnapshot, mix: RequestMix, target: WorkerCounts, loans: tuple[Loan, ...]
) -> tuple[dict[Role, int], int, int]:
    """Return the targets by home, the number of starts, and the starts that the budget denies.
    Workers that loans replace are no longer started."""
    registered, starting = registered_workers(snapshot, mix), count_starting(snapshot)
    targets: dict[Role, int] = {role: snapshot.targets.of(role) for role in ROLES}
    lent = {role: sum(loan.role == role for loan in loans) for role in ROLES}
    short: dict[Role, int] = {}
    for role in ROLES:
        have = registered.of(role) + lent[role]  # the donor's own role can spare them
        spared = min(
            starting.of(role), lent[role], max(0, have + starting.of(role) - target.of(role))
        )
        spared = removable_workers(snapshot, target, role, spared)
        targets[role] -= spared
        short[role] = max(0, target.of(role) - have - starting.of(role) + spared)
    left = affordable_workers(snapshot)
    started = 0
    for role in sorted(ROLES, key=lambda r: -short[r]):
        more = int(min(short[role], left - started))
        targets[role] += more
        started += more
    return targets, started, sum(short.values()) - started


def _may_stop(snapshot: SizingSnapshot, memory: SizingMemory) -> bool:
    last_s = memory.last_down_s
    return last_s is None or snapshot.at_s - last_s >= snapshot.tuning.down_every_s


def _stop(
    snapshot: SizingSnapshot,
    mix: RequestMix,
    memory: SizingMemory,
    target: WorkerCounts,
    targets: dict[Role, int],
) -> int:
    """Lower ``targets`` by one step for each role whose workers have been spare for long enough;
    return the number of stops."""
    tuning = snapshot.tuning
    floor = fit_to_snapshot(needed_lately(memory, snapshot.at_s, tuning), snapshot)
    exact, starting = effective_workers(snapshot, mix, serving=False), count_starting(snapshot)
    stopped = 0
    for role in ROLES:
        have = exact.of(role) + starting.of(role)
        home = pool_to_shrink(snapshot, role)
        each = speed_in_role(snapshot, mix, role, home)
        over = int((have - max(floor.of(role), target.of(role))) / each)
        if over > 0:
            step = min(over, max(1, math.floor(tuning.down_share * have)), targets[home])
            step = removable_workers(snapshot, target, home, step)
            targets[home] -= step
            stopped += step
    return stopped
