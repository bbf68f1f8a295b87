"""The choice of (P, D): candidates, their cost, and who of the near-best takes it. Pure.

    all workers --best 8 by overlap and by load--> 8 P x 8 D and each D alone --cost--> within 5% of
    the best --load--> the least loaded --chance among equals--> the choice

Chance is the caller's generator. Two draws, of which the less loaded wins, keep several routers,
which see the same loads, from all taking the same worker (Mitzenmacher, "The power of two choices
in randomized load balancing", 2001).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple, TypeVar

from router.cost import (
    DecodeTerms,
    PrefillTerms,
    Terms,
    decode_terms,
    local_terms,
    own_terms,
    pair_terms,
    prefill_terms,
)
from router.snapshot import (
    DecodeState,
    Fetch,
    Objectives,
    PrefillState,
    Query,
    Snapshot,
)

WIDTH = 8
"""Workers of each kind that are looked at closely."""
NEAR = 0.05
"""Within this share of the best cost the load decides, and within it of the least load chance."""
NEAR_S = 5e-4
MAX_PREFILL = 3
"""Prefill workers named to the decode worker: the best, and whom to turn to if it fails."""

W = TypeVar("W", PrefillState, DecodeState)


class Placement(NamedTuple):
    """One candidate. ``prefill`` is None where D computes the prompt itself."""

    prefill: str | None
    decode: str
    prefill_cached: int  # of P, or of D where it computes; with the fetch
    decode_cached: int
    fetch: Fetch | None  # by who computes
    load: float
    fits: bool  # D has room for it now
    terms: Terms


class Choice(NamedTuple):
    """``considered`` holds all candidates, the chosen one included; ``others``: prefill workers
    for the same D, best first."""

    chosen: Placement
    others: Sequence[Placement]
    considered: Sequence[Placement]


def choose(query: Query, snapshot: Snapshot, goals: Objectives, chance: Random) -> Choice | None:
    """The placement for a request; None when there is no decode worker."""
    if not snapshot.decode:
        return None
    considered = candidates(query, snapshot, goals, longest(snapshot))
    chosen = least_loaded_of_best(considered, chance)
    return Choice(chosen, alternatives(chosen, considered), considered)


def candidates(
    query: Query, snapshot: Snapshot, goals: Objectives, best: Fetch | None
) -> list[Placement]:
    """``best``: the prefix that any of them could fetch."""
    net = snapshot.network
    near_p = preselected(snapshot.prefill, lambda w: w.queue_s)
    near_d = preselected(snapshot.decode, lambda w: w.batch)
    prefill = [prefill_terms(w, best, query, net) for w in near_p]
    found = []
    for worker in near_d:
        d = decode_terms(worker, query, goals, snapshot.resident_output)
        busy = d.batch / d.rows if d.rows else d.batch * d.step_s / goals.tpot_s
        own, stall = local_terms(worker, d, best, query, net, goals, snapshot.resident_output)
        terms = own_terms(own, d, stall, query, goals)
        found.append(_placement(None, own, d, busy + own.queue_s / goals.ttft_s, terms))
        for p in prefill:
            terms = pair_terms(p, d, query, net, goals)
            found.append(_placement(p.instance, p, d, busy + p.queue_s / goals.ttft_s, terms))
    return found


def _placement(
    prefill: str | None, p: PrefillTerms, d: DecodeTerms, load: float, terms: Terms
) -> Placement:
    return Placement(prefill, d.instance, p.cached, d.cached, p.fetch, load, d.fits, terms)


def longest(snapshot: Snapshot) -> Fetch | None:
    """Who holds most of the prefix: where others could take it from."""
    states = [(w.cached, w.instance) for w in snapshot.prefill]
    states += [(w.cached, w.instance) for w in snapshot.decode]
    cached, instance = max(states, key=lambda s: s[0], default=(0, ""))
    return Fetch(instance, cached, 0.0) if cached else None


def preselected(workers: Sequence[W], load: Callable[[W], float]) -> Sequence[W]:
    """At most WIDTH of them: half by overlap, the rest by load."""
    if len(workers) <= WIDTH:
        return workers
    holders = [w for w in workers if w.cached]
    kept = heapq.nsmallest(WIDTH // 2, holders, key=lambda w: (-w.cached, load(w)))
    taken = {w.instance for w in kept}
    rest = [w for w in workers if w.instance not in taken]
    return kept + heapq.nsmallest(WIDTH - len(kept), rest, key=load)


def least_loaded_of_best(considered: Sequence[Placement], chance: Random) -> Placement:
    fitting = [c for c in considered if c.fits] or considered
    best = min((c.terms for c in fitting), key=lambda terms: terms.cost)
    # Far below the objectives a prefix computed twice hardly shows in the cost: look at TTFT, too.
    cost, ttft_s = best.cost * (1 + NEAR), best.ttft_s * (1 + NEAR) + NEAR_S
    near = [c for c in fitting if c.terms.cost <= cost and c.terms.ttft_s <= ttft_s]
    least = min(c.load for c in near)
    equal = [c for c in near if c.load <= least * (1 + NEAR) + 1e-3]
    if len(equal) == 1:
        return equal[0]
    return min(chance.choice(equal), chance.choice(equal), key=lambda c: c.load)


def alternatives(chosen: Placement, considered: Sequence[Placement]) -> list[Placement]:
    """Other prefill workers for the same decode worker, best first."""
    if chosen.prefill is None:
        return []
    same = [
        c
        for c in considered
        if c.decode == chosen.decode and c.prefill not in (None, chosen.prefill)
    ]
    return heapq.nsmallest(MAX_PREFILL - 1, same, key=lambda c: c.terms.cost)
