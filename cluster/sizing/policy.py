"""The sizing policy: from a snapshot to a decision. Pure.

    demand now, its largest of seconds, of minutes --limits, budget--> target, keep, floor
    below the target        lend what the other role has above keep, then start what is missing
    above the floor         stop some from time to time; Ray Serve chooses which

Loans come before starts, because a worker with its weights loaded changes its role in seconds. A
starting worker counts as present; a leaving one does not, but holds its GPU until it is gone.
"""

from __future__ import annotations

from msgspec.structs import replace

from cluster.sizing.actions import ScalingActions, fit_to_snapshot, plan_actions
from cluster.sizing.decision import (
    ScalingDecision,
    ScalingReason,
    describe_decision,
    infeasible_slos,
)
from cluster.sizing.demand import demand_by_role
from cluster.sizing.memory import (
    record_action,
    record_demand,
    retained_history_s,
    updated_corrections,
)
from cluster.sizing.predict import is_queueing, predict_latency
from cluster.sizing.snapshot import SizingSnapshot, WorkerCounts
from cluster.sizing.worker_counts import count_present, effective_workers


def decide(snapshot: SizingSnapshot) -> ScalingDecision:
    """Return the decision for a snapshot. Without metrics nothing changes."""
    mix, at_s = snapshot.mix, snapshot.at_s
    if mix is None or not snapshot.machines:
        return _keep_everything(snapshot)
    before = snapshot.memory.corrections
    serving = effective_workers(snapshot, mix, serving=True)
    expected = predict_latency(mix, snapshot.machines, serving, before)
    queues = is_queueing(mix, snapshot.machines, serving, before)
    corrections = updated_corrections(snapshot, expected, queues=queues)
    found = demand_by_role(
        mix, snapshot.machines, snapshot.goals, corrections, snapshot.tuning.start_s
    )
    wanted = WorkerCounts(prefill=found["prefill"].workers, decode=found["decode"].workers)
    memory = replace(
        record_demand(snapshot.memory, at_s, wanted, retained_history_s(snapshot.tuning, mix)),
        corrections=corrections,
    )
    actions = plan_actions(snapshot, mix, memory, wanted)
    current, target = count_present(snapshot), fit_to_snapshot(wanted, snapshot)
    reason = _reason(actions, steady=current == target)
    return ScalingDecision(
        wanted=target,
        targets=WorkerCounts(**actions.targets),
        reason=reason,
        text=describe_decision(reason, current, target, found),
        memory=record_action(
            memory, at_s, changed=actions.has_changes, stopped=actions.stopped > 0
        ),
        loans=actions.loans,
        prefill=found["prefill"],
        decode=found["decode"],
        predicted=expected,
        slo_infeasible=infeasible_slos(found),
    )


def _keep_everything(snapshot: SizingSnapshot) -> ScalingDecision:
    return ScalingDecision(
        wanted=count_present(snapshot),
        targets=snapshot.targets,
        reason="no_metrics",
        text="nothing is known of the load: everything stays as it is",
        memory=snapshot.memory,
    )


def _reason(actions: ScalingActions, *, steady: bool) -> ScalingReason:
    """Return the strongest reason that applies."""
    if actions.unmet:
        return "limit"
    if actions.started:
        return "demand"
    if actions.loans:
        return "loan"
    if actions.stopped:
        return "surplus"
    return "steady" if steady else "settling"
