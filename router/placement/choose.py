"""The placement decision: a pair (P, D) of prefill and decode worker for one request. Pure.

    all workers --best 8 by overlap and by load--> 8 P x 8 D and each D alone --cost--> within 5% of
    the best --load--> the least loaded --random among equals--> PlacementChoice

The random generator is passed in. Two draws, of which the less loaded wins, keep several routers
that see the same loads from all choosing the same worker (Mitzenmacher, "The power of two choices
in randomized load balancing", 2001).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from operator import attrgetter
from random import Random
from typing import NamedTuple, TypeAlias, TypeVar

from router.placement.cost import (
    Placement,
    decode_terms,
    local_placement,
    local_prefill_terms,
    prefill_terms,
    remote_placements,
)
from router.placement.snapshot import (
    DecodeState,
    Objectives,
    PlacementQuery,
    PlacementSnapshot,
    PrefillState,
    PrefixFetch,
)

PRESELECTED = 8
"""Workers of each pool for which a cost is computed."""
NEAR_BEST = 0.05
"""Placements within this share of the best cost count as equal, and of these the least loaded is
taken; loads within the same share count as equal, too."""
NEAR_TTFT_S = 5e-4
MAX_PREFILL_CANDIDATES = 3
"""Prefill workers named to the decode worker: the chosen one, then those to try if it fails."""

W = TypeVar("W", PrefillState, DecodeState)


class PlacementChoice(NamedTuple):
    """The decision, with the candidates it was made from."""

    chosen: Placement
    others: Sequence[Placement]  # other prefill workers for the same D, best first
    considered: Sequence[Placement]  # all candidates, ``chosen`` included


ChoosePlacement: TypeAlias = Callable[
    [PlacementQuery, PlacementSnapshot, Objectives, Random], PlacementChoice | None
]
"""Signature of ``choose_placement``; benchmarks and tests pass other policies to the router."""


def choose_placement(
    query: PlacementQuery, snapshot: PlacementSnapshot, goals: Objectives, rng: Random
) -> PlacementChoice | None:
    """Return the placement for a request; None when there is no decode worker."""
    if not snapshot.decode:
        return None
    considered = placement_candidates(query, snapshot, goals, find_longest_prefix(snapshot))
    chosen = pick_near_best(considered, rng)
    return PlacementChoice(chosen, alternative_prefills(chosen, considered), considered)


def placement_candidates(
    query: PlacementQuery,
    snapshot: PlacementSnapshot,
    goals: Objectives,
    best: PrefixFetch | None,
) -> list[Placement]:
    """Return the placements on the preselected workers; ``best``: a prefix that any of them may
    fetch."""
    net, residents = snapshot.network, snapshot.resident_output
    near_p = preselect_workers(snapshot.prefill, attrgetter("queue_s"))
    near_d = preselect_workers(snapshot.decode, attrgetter("batch"))
    prefill = [prefill_terms(w, best, query, net, goals) for w in near_p]
    found = []
    for worker in near_d:
        d = decode_terms(worker, query, goals, residents)
        own, stall = local_prefill_terms(worker, d, best, query, net, goals, residents)
        found.append(local_placement(own, d, stall, query, goals))
        found += remote_placements(prefill, d, query, net, goals)
    return found


def find_longest_prefix(snapshot: PlacementSnapshot) -> PrefixFetch | None:
    """Return the longest cached prefix and its worker: what the others could fetch."""
    workers = [*snapshot.prefill, *(w.own for w in snapshot.decode)]
    most = max(workers, key=attrgetter("cached"), default=None)
    return PrefixFetch(most.instance, most.cached, 0.0) if most and most.cached else None


def preselect_workers(workers: Sequence[W], load: Callable[[W], float]) -> Sequence[W]:
    """Return at most PRESELECTED workers: half by overlap, the rest by load."""
    if len(workers) <= PRESELECTED:
        return workers
    holders = [w for w in workers if w.cached]
    kept = sorted(holders, key=lambda w: (-w.cached, load(w)))[: PRESELECTED // 2]
    taken = {w.instance for w in kept}
    by_load = sorted(workers, key=load)[
        :PRESELECTED
    ]  # enough, as half of them may be taken already
    return (kept + [w for w in by_load if w.instance not in taken])[:PRESELECTED]


def pick_near_best(considered: Sequence[Placement], rng: Random) -> Placement:
    """Return the least loaded of the placements whose cost and TTFT are near the best."""
    fitting = [c for c in considered if c.d.fits] or considered
    best = min(fitting, key=attrgetter("cost"))
    # Far below the objectives a prefix computed twice hardly shows in the cost: look at TTFT, too.
    cost, ttft_s = best.cost * (1 + NEAR_BEST), best.ttft_s * (1 + NEAR_BEST) + NEAR_TTFT_S
    near = [c for c in fitting if c.cost <= cost and c.ttft_s <= ttft_s]
    near = near or [best]  # a cost that is NaN compares with nothing
    least = min(c.load for c in near)
    equal = [c for c in near if c.load <= least * (1 + NEAR_BEST) + 1e-3]
    if len(equal) == 1:
        return equal[0]
    return min(rng.choice(equal), rng.choice(equal), key=attrgetter("load"))


def alternative_prefills(chosen: Placement, considered: Sequence[Placement]) -> list[Placement]:
    """Return placements with other prefill workers for the same decode worker, best first."""
    if chosen.prefill is None:
        return []
    others = [c for c in considered if c.prefill not in (None, chosen.prefill)]
    same = [c for c in others if c.d is chosen.d]
    return heapq.nsmallest(MAX_PREFILL_CANDIDATES - 1, same, key=attrgetter("cost"))
