"""Corrections of the performance model: observed over predicted, of the same work. Pure.

    prefill   seconds of steps, as prefill workers report them, over those that the prompt tokens in
              these steps should take. Waits are in neither. A step that several prompts share
              takes less than they would alone, which counts.
    decode    TPOT, while the workers are the same, so that the observation belongs to them
    kv        tokens that resident sequences hold

All are means that forget, within bounds. ``policy.py`` calls this.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from cluster.sizing.decision import PredictedLatency
from cluster.sizing.demand import machine_for_role
from cluster.sizing.queueing import mean_prompt_tokens, mean_uncached_tokens, prefill_service
from cluster.sizing.snapshot import (
    ComputedPrompts,
    Corrections,
    ObservedLatency,
    RequestMix,
    SizingSnapshot,
)
from protocol.roles import ROLES

CORRECTION_WEIGHT = 0.1
"""Weight of a new ratio of observed to predicted."""
TOLERANCE = 1.3
"""Ratio of TPOT up to which nothing is corrected: it has waits for pages that the model does not
know, and as a correction they would count as work. In the simulator, whose steps are exact, they
came to 1.4 where decode pools were nearly full."""
MEMORY_S = 300.0
"""Computed prompts count by exp(-age/MEMORY_S)."""
MIN_COMPUTED_S = 30.0
"""Predicted seconds of computed prompts from which on they are compared."""
MIN_RESIDENTS = 20
"""Resident sequences from which on their mean KV is trusted."""
MIN_CORRECTION, MAX_CORRECTION = 0.5, 2.0
"""Bounds of a correction."""
CORRECTIONS = ("prefill", "decode", "kv")


def updated_corrections(
    snapshot: SizingSnapshot,
    expected: PredictedLatency,
    computed: ComputedPrompts,
    *,
    lacks_room: bool,
) -> Corrections:
    """Return the corrections after this observation.

    ``expected``: the prediction for the serving workers with the corrections so far.
    ``lacks_room``: sequences wait for pages, so that their TPOT says nothing about the speed of
    decode.
    """
    before, observed = snapshot.memory.corrections, snapshot.observed
    kv = _updated(before.kv, _resident_kv(snapshot), expected.kv_tokens)
    prefill, decode = before.prefill, before.decode
    if computed.expected_s >= MIN_COMPUTED_S:
        prefill = _bounded(computed.busy_s / computed.expected_s)
    if is_stable(snapshot) and not lacks_room:
        decode = _updated(decode, observed.tpot_s, expected.tpot_s, TOLERANCE)
    return Corrections(prefill=prefill, decode=decode, kv=kv)


def _resident_kv(snapshot: SizingSnapshot) -> float | None:
    """Return the mean KV tokens of a sequence that decodes; None where there are too few."""
    if snapshot.mix is None or snapshot.mix.residents < MIN_RESIDENTS:
        return None
    held = sum(
        w.kv_tokens for w in snapshot.workers if w.role == "decode" and w.state != "changing"
    )
    return held / snapshot.mix.residents


def computed_prompts(snapshot: SizingSnapshot, mix: RequestMix) -> ComputedPrompts:
    """Add what the prefill workers have computed since the last decision. ``mix``: of the prompts
    that were answered."""
    before, past = snapshot.memory.computed, snapshot.memory.past
    tokens = mean_uncached_tokens(mix)
    if not past or tokens <= 0:
        return before
    seconds = min(snapshot.at_s - past[-1].at_s, mix.window_s)  # of a gap, nothing more is known
    kept = math.exp(-seconds / MEMORY_S)
    busy_s, expected_s = before.busy_s * kept, before.expected_s * kept
    for home in ROLES:
        machine = machine_for_role(home, snapshot.machines)
        token_s = prefill_service(mix, machine).mean_s / tokens
        for worker in snapshot.workers:
            if worker.home == home and worker.role == "prefill" and worker.state != "changing":
                busy_s += worker.busy * seconds
                expected_s += worker.prompt_tokens_s * token_s * seconds
    return ComputedPrompts(busy_s, expected_s)


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
    return _bounded(before + CORRECTION_WEIGHT * (ratio - before))


def _bounded(ratio: float) -> float:
    return min(MAX_CORRECTION, max(MIN_CORRECTION, ratio))
