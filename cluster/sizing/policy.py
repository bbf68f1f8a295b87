"""The sizing policy: from a snapshot to a decision. Pure.

    demand now --limits, budget--> target
    below the target    lend what the other role can spare, then start what is missing
    above the target    stop what has been spare for as long as its start costs, in steps; Ray Serve
                        chooses which

Loans come before starts, because a worker with its weights loaded changes its role in seconds. A
starting worker counts as present; a leaving one does not, but holds its GPU until it is gone.
"""

from __future__ import annotations

from msgspec.structs import replace

from cluster.sizing.actions import ScalingActions, fit_to_snapshot, plan_actions
from cluster.sizing.corrections import answered_mix, record_corrections
from cluster.sizing.decision import (
    LoadForecast,
    ScalingDecision,
    ScalingReason,
    describe_decision,
    infeasible_slos,
)
from cluster.sizing.demand import demand_by_role
from cluster.sizing.growth import expected_growth
from cluster.sizing.memory import forecast_error, record_demand
from cluster.sizing.predict import predict_latency
from cluster.sizing.snapshot import SizingSnapshot, WorkerCounts
from cluster.sizing.worker_counts import count_present, count_starting, effective_workers


def decide(snapshot: SizingSnapshot) -> ScalingDecision:
    """Return the decision for a snapshot. Without metrics nothing changes."""
    mix, at_s = snapshot.mix, snapshot.at_s
    if mix is None or not snapshot.machines:
        return _keep_everything(snapshot)
    before = snapshot.memory.corrections
    serving = effective_workers(snapshot, mix, serving=True)
    answered = answered_mix(mix, snapshot.observed)
    expected = predict_latency(answered, snapshot.machines, serving, before)
    growth = expected_growth(snapshot.memory.growth)
    mix = replace(mix, growth_samples=growth, resident_kv=_held_kv(snapshot))
    most, start_s = snapshot.limits.most.prefill, snapshot.tuning.start_s
    found = demand_by_role(mix, snapshot.machines, snapshot.goals, before, start_s, most)
    # Beside prompts that prefill workers have no time for, too, TPOT says nothing about decode.
    lacks_room = found["decode"].workers > serving.decode or found["prefill"].load > most
    memory = record_corrections(snapshot, mix, answered, expected, lacks_room=lacks_room)
    wanted = WorkerCounts(prefill=found["prefill"].workers, decode=found["decode"].workers)
    current, target = count_present(snapshot), fit_to_snapshot(wanted, snapshot)
    starting = count_starting(snapshot)
    lasting = WorkerCounts(prefill=found["prefill"].lasting, decode=found["decode"].lasting)
    memory = record_demand(
        *(memory, at_s, mix, wanted, current, snapshot.tuning, starting, lasting)
    )
    actions = plan_actions(snapshot, mix, memory, wanted, lasting)
    if actions.loans or actions.started or actions.stopped:
        memory = replace(memory, last_change_s=at_s)
    if actions.stopped:
        memory = replace(memory, last_down_s=at_s)
    reason = _reason(actions, steady=current == target)
    return ScalingDecision(
        wanted=target,
        targets=WorkerCounts(**actions.targets),
        reason=reason,
        text=describe_decision(reason, current, target, found),
        memory=memory,
        loans=actions.loans,
        prefill=found["prefill"],
        decode=found["decode"],
        predicted=expected,
        slo_infeasible=infeasible_slos(found),
        forecast=LoadForecast(rate=mix.rate, prefill=wanted.prefill, decode=wanted.decode),
        forecast_error=forecast_error(memory, at_s),
    )


def _held_kv(snapshot: SizingSnapshot) -> float:
    """Return the KV tokens that decode workers hold for sequences. A worker that changes its role
    still has those of its present one."""
    decoding = (w for w in snapshot.workers if (w.role == "decode") != (w.state == "changing"))
    return float(sum(w.kv_tokens for w in decoding))


def _keep_everything(snapshot: SizingSnapshot) -> ScalingDecision:
    return ScalingDecision(
        wanted=count_present(snapshot),
        targets=snapshot.targets,
        reason="no_metrics",
        text="the load is unknown: nothing changes",
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
