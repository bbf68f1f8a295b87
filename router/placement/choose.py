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
from operator import attrgetter
from random import Random
from typing import NamedTuple, TypeVar

from router.placement.cost import (
    Placement,
    decode_terms,
    local,
    local_terms,
    prefill_terms,
    remotes,
)
from router.placement.snapshot import DecodeState, Fetch, Objectives, PrefillState, Query, Snapshot

WIDTH = 8
"""Workers of each kind that are looked at closely."""
NEAR = 0.05
"""Within this share of the best cost the load decides, and within it of the least load chance."""
NEAR_S = 5e-4
MAX_PREFILL = 3
"""Prefill workers named to the decode worker: the best, and whom to turn to if it fails."""

W = TypeVar("W", PrefillState, DecodeState)


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
    net, residents = snapshot.network, snapshot.resident_output
    near_p = preselected(snapshot.prefill, attrgetter("queue_s"))
    near_d = preselected(snapshot.decode, attrgetter("batch"))
    prefill = [prefill_terms(w, best, query, net, goals) for w in near_p]
    found = []
    for worker in near_d:
        d = decode_terms(worker, query, goals, residents)
        own, stall = local_terms(worker, d, best, query, net, goals, residents)
        found.append(local(own, d, stall, query, goals))
        found += remotes(prefill, d, query, net, goals)
    return found


def longest(snapshot: Snapshot) -> Fetch | None:
    """Who holds most of the prefix: where others could take it from."""
    workers = [*snapshot.prefill, *(w.own for w in snapshot.decode)]
    most = max(workers, key=attrgetter("cached"), default=None)
    return Fetch(most.instance, most.cached, 0.0) if most and most.cached else None


def preselected(workers: Sequence[W], load: Callable[[W], float]) -> Sequence[W]:
    """At most WIDTH of them: half by overlap, the rest by load."""
    if len(workers) <= WIDTH:
        return workers
    holders = [w for w in workers if w.cached]
    kept = sorted(holders, key=lambda w: (-w.cached, load(w)))[: WIDTH // 2]
    taken = {w.instance for w in kept}
    by_load = sorted(workers, key=load)[:WIDTH]  # enough, as half of them may be taken already
    return (kept + [w for w in by_load if w.instance not in taken])[:WIDTH]


def least_loaded_of_best(considered: Sequence[Placement], chance: Random) -> Placement:
    fitting = [c for c in considered if c.d.fits] or considered
    best = min(fitting, key=attrgetter("cost"))
    # Far below the objectives a prefix computed twice hardly shows in the cost: look at TTFT, too.
    cost, ttft_s = best.cost * (1 + NEAR), best.ttft_s * (1 + NEAR) + NEAR_S
    near = [c for c in fitting if c.cost <= cost and c.ttft_s <= ttft_s]
    near = near or [best]  # costs that are no numbers compare with nothing
    least = min(c.load for c in near)
    equal = [c for c in near if c.load <= least * (1 + NEAR) + 1e-3]
    if len(equal) == 1:
        return equal[0]
    return min(chance.choice(equal), chance.choice(equal), key=attrgetter("load"))


def alternatives(chosen: Placement, considered: Sequence[Placement]) -> list[Placement]:
    """Other prefill workers for the same decode worker, best first."""
    if chosen.prefill is None:
        return []
    others = [c for c in considered if c.prefill not in (None, chosen.prefill)]
    same = [c for c in others if c.d is chosen.d]
    return heapq.nsmallest(MAX_PREFILL - 1, same, key=attrgetter("cost"))
