"""What the policy carries from one decision to the next. Pure.

Demand: the largest of a while, so that a dip sends nobody away. Corrections: a mean of observed to
predicted time, weighted by age, within bounds; taken while nothing changes, so that what is
observed belongs to the workers that were there.
"""

from __future__ import annotations

from msgspec.structs import replace

from cluster.sizing.decision import Predicted
from cluster.sizing.snapshot import Corrections, Counts, Memory, Mix, Past, Snapshot, Tuning

WEIGHT = 0.1
"""Of a new ratio of observed to predicted."""
ENOUGH = 20
"""Residents whose KV tells what one holds."""
LEAST, MOST = 0.5, 2.0
"""Bounds of a correction."""


def remembered(memory: Memory, at_s: float, demand: Counts, keep_s: float) -> Memory:
    """With the demand of now; what is older than ``keep_s`` goes, but for the last such."""
    now = Past(at_s, demand.prefill, demand.decode)
    past = (*memory.past, now)
    old = [p for p in past if p.at_s < at_s - keep_s]
    return replace(memory, past=(*old[-1:], *(p for p in past if p.at_s >= at_s - keep_s)))


def known_s(tuning: Tuning, mix: Mix) -> float:
    """Seconds of demand that have to be known before a role lends."""
    return max(tuning.lend_after_s, mix.window_s)


def kept_s(tuning: Tuning, mix: Mix) -> float:
    """Seconds of demand that are remembered."""
    return max(down_s(tuning), known_s(tuning, mix))


def down_s(tuning: Tuning) -> float:
    """Seconds for which less must have done before workers go: what takes long to start is kept
    as long."""
    return max(tuning.down_after_s, tuning.start_s)


def acted(memory: Memory, at_s: float, *, changed: bool, stopped: bool) -> Memory:
    """With the time of what is now done."""
    return replace(
        memory,
        last_change_s=at_s if changed else memory.last_change_s,
        last_down_s=at_s if stopped else memory.last_down_s,
    )


def largest(memory: Memory, at_s: float, within_s: float) -> Counts:
    """The largest demand of the last ``within_s`` for each role."""
    recent = [p for p in memory.past if p.at_s >= at_s - within_s]
    return Counts(
        prefill=max((p.prefill for p in recent), default=0),
        decode=max((p.decode for p in recent), default=0),
    )


def covers(memory: Memory, at_s: float, within_s: float) -> bool:
    """Whether it reaches back so far."""
    return bool(memory.past) and memory.past[0].at_s <= at_s - within_s


def corrected(snapshot: Snapshot, expected: Predicted, *, queues: bool) -> Corrections:
    """``expected``: what the corrections so far make of the workers that serve. ``queues``: prompts
    wait, and how long they did says nothing of how long they take."""
    before, observed = snapshot.memory.corrections, snapshot.observed
    kv = _moved(before.kv, _resident_kv(snapshot), expected.kv_tokens)
    if not is_calm(snapshot):
        return replace(before, kv=kv)
    return Corrections(
        prefill=before.prefill
        if queues
        else _moved(before.prefill, observed.ttft_s, expected.ttft_s),
        decode=_moved(before.decode, observed.tpot_s, expected.tpot_s),
        kv=kv,
    )


def _resident_kv(snapshot: Snapshot) -> float | None:
    """Tokens that one of those who decode now holds; None where they are too few to tell."""
    if snapshot.mix is None or snapshot.mix.residents < ENOUGH:
        return None
    held = sum(
        w.kv_tokens for w in snapshot.workers if w.role == "decode" and w.state != "changing"
    )
    return held / snapshot.mix.residents


def is_calm(snapshot: Snapshot) -> bool:
    """Whether the window saw the workers that are there, and no others."""
    if snapshot.mix is None or any(w.state != "serving" for w in snapshot.workers):
        return False
    changed_s = snapshot.memory.last_change_s
    return changed_s is None or snapshot.at_s - changed_s >= snapshot.mix.window_s


def _moved(before: float, observed_s: float | None, expected_s: float | None) -> float:
    if observed_s is None or not expected_s:
        return before
    ratio = before * observed_s / expected_s
    return min(MOST, max(LEAST, before + WEIGHT * (ratio - before)))
