"""From a snapshot to a decision. Pure.

    demand now, its most of seconds, of minutes --limits, budget--> target, keep, floor
    short of the target     lend what the other role has over keep, then start what is still missing
    above the floor         stop some, now and then; whom, is for the pools to say

Loans come before starts: a worker with its weights loaded changes its role in seconds. What starts
counts as there; what leaves does not, but holds its GPU until it is gone.
"""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from cluster.sizing import memory as memories
from cluster.sizing.decision import Decision, Need, Reason, say
from cluster.sizing.demand import needs
from cluster.sizing.moves import Moves, fitted, moves
from cluster.sizing.predict import is_queueing, predicted
from cluster.sizing.snapshot import Counts, Snapshot
from cluster.sizing.worker_counts import present, strength
from protocol.roles import Role

Slo = Literal["ttft", "tpot"]


def decide(snapshot: Snapshot) -> Decision:
    """What to do now. Without metrics everything stays as it is."""
    mix, at_s = snapshot.mix, snapshot.at_s
    if mix is None or not snapshot.machines:
        return _held(snapshot)
    before = snapshot.memory.corrections
    serving = strength(snapshot, mix, serving=True)
    expected = predicted(mix, snapshot.machines, serving, before)
    queues = is_queueing(mix, snapshot.machines, serving, before)
    corrections = memories.corrected(snapshot, expected, queues=queues)
    found = needs(mix, snapshot.machines, snapshot.goals, corrections, snapshot.tuning.start_s)
    wanted = Counts(prefill=found["prefill"].workers, decode=found["decode"].workers)
    memory = replace(
        memories.remembered(snapshot.memory, at_s, wanted, memories.kept_s(snapshot.tuning, mix)),
        corrections=corrections,
    )
    todo = moves(snapshot, mix, memory, wanted)
    have, target = present(snapshot), fitted(wanted, snapshot)
    reason = _reason(todo, steady=have == target)
    return Decision(
        wanted=target,
        targets=Counts(**todo.targets),
        reason=reason,
        text=say(reason, have, target, found),
        memory=memories.acted(memory, at_s, changed=_changes(todo), stopped=todo.stopped > 0),
        loans=todo.loans,
        prefill=found["prefill"],
        decode=found["decode"],
        predicted=expected,
        slo_infeasible=_infeasible(found),
    )


def _held(snapshot: Snapshot) -> Decision:
    return Decision(
        wanted=present(snapshot),
        targets=snapshot.targets,
        reason="no_metrics",
        text="nothing is known of the load: everything stays as it is",
        memory=snapshot.memory,
    )


def _changes(todo: Moves) -> bool:
    return bool(todo.loans or todo.started or todo.stopped)


def _infeasible(found: dict[Role, Need]) -> tuple[Slo, ...]:
    of: tuple[tuple[Slo, Role], ...] = (("ttft", "prefill"), ("tpot", "decode"))
    return tuple(name for name, role in of if found[role].infeasible)


def _reason(todo: Moves, *, steady: bool) -> Reason:
    """The strongest of those that apply."""
    if todo.unmet:
        return "limit"
    if todo.started:
        return "demand"
    if todo.loans:
        return "loan"
    if todo.stopped:
        return "surplus"
    return "steady" if steady else "settling"
