"""Corrections of the performance model: observed over predicted latency of the same requests. Pure.

Each is an exponentially weighted mean, within bounds. It is updated only while nothing changes, so
that the observation belongs to the workers that were there. ``policy.py`` calls this.
"""

from __future__ import annotations

from msgspec.structs import replace

from cluster.sizing.decision import PredictedLatency
from cluster.sizing.queueing import mean_prompt_tokens
from cluster.sizing.snapshot import Corrections, ObservedLatency, RequestMix, SizingSnapshot

CORRECTION_WEIGHT = 0.1
"""Weight of a new ratio of observed to predicted."""
TOLERANCE = 1.3
"""Ratio of latencies up to which nothing is corrected. Latencies also have waits that the model
does not know: for the step that runs, for other prompts in the same step, for pages, for a burst.
As a correction they would count as work: in the simulator, whose steps are exact, they came to 1.28
for TTFT, and to 1.4 for TPOT where decode pools were nearly full."""
MIN_RESIDENTS = 20
"""Resident sequences from which on their mean KV is trusted."""
MIN_CORRECTION, MAX_CORRECTION = 0.5, 2.0
"""Bounds of a correction."""
CORRECTIONS = ("prefill", "decode", "kv")


def updated_corrections(
    snapshot: SizingSnapshot, expected: PredictedLatency, *, queues: bool, lacks_room: bool
) -> Corrections:
    """Return the corrections after this observation.

    ``expected``: the prediction for the serving workers with the corrections so far. ``queues``:
    prompts wait, so that their TTFT says nothing about the speed of prefill. ``lacks_room``:
    sequences wait for pages, so that their TPOT says nothing about the speed of decode.
    """
    before, observed = snapshot.memory.corrections, snapshot.observed
    kv = _updated(before.kv, _resident_kv(snapshot), expected.kv_tokens)
    if not is_stable(snapshot):
        return replace(before, kv=kv)
    return Corrections(
        prefill=before.prefill
        if queues
        else _updated(before.prefill, observed.ttft_s, expected.ttft_s, TOLERANCE),
        decode=before.decode
        if lacks_room
        else _updated(before.decode, observed.tpot_s, expected.tpot_s, TOLERANCE),
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


def answered_mix(mix: RequestMix, observed: ObservedLatency) -> RequestMix:
    """Return the mix of those requests that ``observed`` is of: prompts that are queued or refused,
    which may be longer, have no TTFT."""
    arrived = mean_prompt_tokens(mix) if mix.samples else 0.0
    if arrived <= 0 or observed.prompt_tokens <= 0:
        return mix
    scale = observed.prompt_tokens / arrived
    samples = tuple(
        replace(s, uncached=scale * s.uncached, cached=scale * s.cached) for s in mix.samples
    )
    return replace(mix, samples=samples)


def is_stable(snapshot: SizingSnapshot) -> bool:
    """Return whether the workers were the same while the observed requests were served: those that
    have ended in the window may have begun one TTFT and one answer before it."""
    mix, observed, changed_s = snapshot.mix, snapshot.observed, snapshot.memory.last_change_s
    if mix is None or any(w.state != "serving" for w in snapshot.workers):
        return False
    output = sum(s.weight * s.output for s in mix.samples) / max(
        1, sum(s.weight for s in mix.samples)
    )
    lasts_s = (observed.ttft_s or 0.0) + output * (observed.tpot_s or 0.0)
    return changed_s is None or snapshot.at_s - changed_s >= mix.window_s + lasts_s


def bounded_corrections(corrections: Corrections) -> tuple[str, ...]:
    """Return the corrections that stand at a bound: the model is wrong there."""
    bounds = (MIN_CORRECTION, MAX_CORRECTION)
    return tuple(name for name in CORRECTIONS if getattr(corrections, name) in bounds)


def _updated(
    before: float, observed: float | None, expected: float | None, tolerance: float = 1.0
) -> float:
    if observed is None or not expected:
        return before
    ratio = before * observed / expected
    ratio = max(ratio / tolerance, min(1.0, ratio * tolerance))
    return min(MAX_CORRECTION, max(MIN_CORRECTION, before + CORRECTION_WEIGHT * (ratio - before)))
