"""The state that the policy carries from one decision to the next. Pure.

Demand: the largest of a period, so that a dip does not stop workers. Corrections: an exponentially
weighted mean of observed to predicted time, within bounds; updated only while nothing changes, so
that the observation belongs to the workers that were there.
"""

from __future__ import annotations

from msgspec.structs import replace

from cluster.sizing.decision import PredictedLatency
from cluster.sizing.snapshot import (
    Corrections,
    DemandSample,
    RequestMix,
    ScalingTuning,
    SizingMemory,
    SizingSnapshot,
    WorkerCounts,
)

CORRECTION_WEIGHT = 0.1
"""Weight of a new ratio of observed to predicted."""
MIN_RESIDENTS = 20
"""Resident sequences from which on their mean KV is trusted."""
MIN_CORRECTION, MAX_CORRECTION = 0.5, 2.0
"""Bounds of a correction."""


def record_demand(
    memory: SizingMemory, at_s: float, demand: WorkerCounts, keep_s: float
) -> SizingMemory:
    """Add the current demand; drop samples older than ``keep_s``, except for the last of them."""
    now = DemandSample(at_s, demand.prefill, demand.decode)
    past = (*memory.past, now)
    old = [p for p in past if p.at_s < at_s - keep_s]
    return replace(memory, past=(*old[-1:], *(p for p in past if p.at_s >= at_s - keep_s)))


def lending_history_s(tuning: ScalingTuning, mix: RequestMix) -> float:
    """Return the seconds of demand that must be known before a role lends."""
    return max(tuning.lend_after_s, mix.window_s)


def retained_history_s(tuning: ScalingTuning, mix: RequestMix) -> float:
    """Return the seconds of demand that are kept."""
    return max(shrink_history_s(tuning), lending_history_s(tuning, mix))


def shrink_history_s(tuning: ScalingTuning) -> float:
    """Return the seconds for which fewer workers must have sufficed before some are stopped: at
    least the time that a start takes."""
    return max(tuning.down_after_s, tuning.start_s)


def record_action(
    memory: SizingMemory, at_s: float, *, changed: bool, stopped: bool
) -> SizingMemory:
    """Store the time of the actions of this decision."""
    return replace(
        memory,
        last_change_s=at_s if changed else memory.last_change_s,
        last_down_s=at_s if stopped else memory.last_down_s,
    )


def largest_demand(memory: SizingMemory, at_s: float, within_s: float) -> WorkerCounts:
    """Return the largest demand of the last ``within_s`` for each role."""
    recent = [p for p in memory.past if p.at_s >= at_s - within_s]
    return WorkerCounts(
        prefill=max((p.prefill for p in recent), default=0),
        decode=max((p.decode for p in recent), default=0),
    )


def has_history(memory: SizingMemory, at_s: float, within_s: float) -> bool:
    """Return whether the samples reach back ``within_s``."""
    return bool(memory.past) and memory.past[0].at_s <= at_s - within_s


def updated_corrections(
    snapshot: SizingSnapshot, expected: PredictedLatency, *, queues: bool
) -> Corrections:
    """Return the corrections after this observation.

    ``expected``: the prediction for the serving workers with the corrections so far. ``queues``:
    prompts wait, so that their TTFT says nothing about the speed of prefill.
    """
    before, observed = snapshot.memory.corrections, snapshot.observed
    kv = _updated(before.kv, _resident_kv(snapshot), expected.kv_tokens)
    if not is_stable(snapshot):
        return replace(before, kv=kv)
    return Corrections(
        prefill=before.prefill
        if queues
        else _updated(before.prefill, observed.ttft_s, expected.ttft_s),
        decode=_updated(before.decode, observed.tpot_s, expected.tpot_s),
        kv=kv,
    )


def _resident_kv(snapshot: SizingSnapshot) -> float | None:
    """Return the mean KV tokens of a sequence that decodes; None where there are too few."""
    if snapshot.mix is None or snapshot.mix.residents < MIN_RESIDENTS:
        return None
    held = sum(
        w.kv_tokens for w in snapshot.workers if w.role == "decode" and w.state != "changing"
    )
    return held / snapshot.mix.residents


def is_stable(snapshot: SizingSnapshot) -> bool:
    """Return whether the workers were the same throughout the window."""
    if snapshot.mix is None or any(w.state != "serving" for w in snapshot.workers):
        return False
    changed_s = snapshot.memory.last_change_s
    return changed_s is None or snapshot.at_s - changed_s >= snapshot.mix.window_s


def _updated(before: float, observed_s: float | None, expected_s: float | None) -> float:
    if observed_s is None or not expected_s:
        return before
    ratio = before * observed_s / expected_s
    return min(MAX_CORRECTION, max(MIN_CORRECTION, before + CORRECTION_WEIGHT * (ratio - before)))
