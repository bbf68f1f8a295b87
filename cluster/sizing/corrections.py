"""Corrections of the performance model: observed over predicted, of the same work. Pure.

    prefill   seconds of steps, as prefill workers report them, over those that the prompt tokens in
              these steps should take. Waits are in neither. A step that several prompts share
              takes less than they would alone, which counts.
    decode    TPOT, while the workers are the same, so that the observation belongs to them
    kv        tokens that sequences hold while they decode

All are means that forget, within bounds. Those of prefill and KV count by how many requests they
are of. ``policy.py`` calls this.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from cluster.sizing.decision import PredictedLatency
from cluster.sizing.demand import machine_for_role
from cluster.sizing.queueing import mean_prompt_tokens, mean_uncached_tokens, prefill_service
from cluster.sizing.snapshot import (
    ComparedWork,
    Corrections,
    ObservedLatency,
    RequestMix,
    SizingMemory,
    SizingSnapshot,
)
from protocol.roles import ROLES

CORRECTION_WEIGHT = 0.1
"""Weight of a new ratio of observed to predicted TPOT."""
TOLERANCE = 1.3
"""Ratio of TPOT up to which nothing is corrected: it has waits for pages that the model does not
know, and as a correction they would count as work. In the simulator, whose steps are exact, they
came to 1.4 where decode pools were nearly full."""
MEMORY_S = 300.0
"""Compared work counts by exp(-age/MEMORY_S), and where fewer requests than KNOWN_REQUESTS come in
that time, by exp(-requests/KNOWN_REQUESTS)."""
KNOWN_REQUESTS = 200
"""Requests after which a ratio counts in full: lengths differ so much that the ratio of n requests
is off by some 1.5/sqrt(n). Of fewer, it counts by their share."""
MIN_CORRECTION, MAX_CORRECTION = 0.5, 2.0
"""Bounds of a correction."""
CORRECTIONS = ("prefill", "decode", "kv")


def record_corrections(
    snapshot: SizingSnapshot,
    mix: RequestMix,
    answered: RequestMix,
    expected: PredictedLatency,
    *,
    lacks_room: bool,
) -> SizingMemory:
    """Return the memory with the corrections after this observation.

    ``mix``: of all requests. ``answered``: the mix of the prompts that were answered. ``expected``:
    its prediction for the serving workers with the corrections so far. ``lacks_room``: sequences
    wait for pages, so that their TPOT says nothing about the speed of decode.
    """
    memory, decode = snapshot.memory, snapshot.memory.corrections.decode
    if is_stable(snapshot) and not lacks_room:
        decode = _updated_pace(decode, snapshot.observed.tpot_s, expected.tpot_s)
    computed_s, held_kv = compared_prompts(snapshot, answered), compared_kv(snapshot, mix, expected)
    prefill, kv = _correction(computed_s), _correction(held_kv)
    corrections = Corrections(prefill=prefill, decode=decode, kv=kv)
    return replace(memory, corrections=corrections, computed_s=computed_s, held_kv=held_kv)


def compared_prompts(snapshot: SizingSnapshot, mix: RequestMix) -> ComparedWork:
    """Add what the prefill workers have computed since the last decision. ``mix``: of the prompts
    that were answered."""
    before, tokens = snapshot.memory.computed_s, mean_uncached_tokens(mix)
    seconds = _seconds_since(snapshot, mix)
    if tokens <= 0:
        return before
    busy = expected = requests = 0.0
    for home in ROLES:
        mean_s = prefill_service(mix, machine_for_role(home, snapshot.machines)).mean_s
        for worker in snapshot.workers:
            if worker.home == home and worker.role == "prefill" and worker.state != "changing":
                prompts = worker.prompt_tokens_s / tokens
                busy, expected = busy + worker.busy, expected + prompts * mean_s
                requests += prompts
    return _compared(before, busy, expected, requests, seconds)


def compared_kv(
    snapshot: SizingSnapshot, mix: RequestMix, expected: PredictedLatency
) -> ComparedWork:
    """Add what the sequences that decode have held since the last decision."""
    before = snapshot.memory.held_kv
    if not expected.kv_tokens or mix.residents <= 0:
        return before
    each = expected.kv_tokens / snapshot.memory.corrections.kv
    seconds = _seconds_since(snapshot, mix)
    return _compared(before, mix.resident_kv, mix.residents * each, mix.rate, seconds)


def _seconds_since(snapshot: SizingSnapshot, mix: RequestMix) -> float:
    """Return the time since the last decision. Of a gap, no more is known than the window."""
    past = snapshot.memory.past
    return min(snapshot.at_s - past[-1].at_s, mix.window_s) if past else 0.0


def _compared(
    before: ComparedWork, observed: float, expected: float, requests: float, seconds: float
) -> ComparedWork:
    """Add the work of ``seconds``; all figures are those of each second."""
    kept = math.exp(-seconds * min(1.0 / MEMORY_S, requests / KNOWN_REQUESTS))
    return ComparedWork(
        observed=before.observed * kept + observed * seconds,
        expected=before.expected * kept + expected * seconds,
        requests=before.requests + requests * seconds,
    )


def _correction(of: ComparedWork) -> float:
    """Return the ratio as far as it is known."""
    if of.expected <= 0:
        return 1.0
    known = min(1.0, of.requests / KNOWN_REQUESTS)
    return 1.0 + known * (_bounded(of.observed / of.expected) - 1.0)


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


def _updated_pace(before: float, observed: float | None, expected: float | None) -> float:
    if observed is None or not expected:
        return before
    ratio = before * observed / expected
    ratio = max(ratio / TOLERANCE, min(1.0, ratio * TOLERANCE))
    return _bounded(before + CORRECTION_WEIGHT * (ratio - before))


def _bounded(ratio: float) -> float:
    return min(MAX_CORRECTION, max(MIN_CORRECTION, ratio))
