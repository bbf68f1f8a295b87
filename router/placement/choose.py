"""The placement decision: a pair (P, D) of prefill and decode worker for one request. Pure.

    all workers --best 8 by overlap, room and load--> 8 P x 8 D and each D alone --cost--> within 5%
    of the best --load--> the least loaded --weighted chance--> PlacementChoice

The random generator is passed in. Chance keeps several routers that see the same loads from all
choosing the same worker. With eight routers it brings as much goodput as the less loaded of two
draws (Mitzenmacher, "The power of two choices in randomized load balancing", 2001), and more where
loads are old (``bench/router/many_routers.py``).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from random import Random
from typing import NamedTuple, TypeAlias, TypeVar

from router.placement.cost import (
    Placement,
    decode_step_s,
    decode_terms,
    local_placement,
    local_prefill_terms,
    prefill_terms,
    remote_placements,
    source_wait_s,
    usable_tokens,
)
from router.placement.snapshot import (
    DecodeState,
    Objectives,
    PlacementQuery,
    PlacementSnapshot,
    PrefixSource,
)

PRESELECTED = 8
"""Workers of each pool for which a cost is computed."""
NEAR_BEST = 0.05
"""Placements within this share of the best cost count as equal, and of these one of the least
loaded is taken."""
EQUAL_LOAD = 0.25
"""Loads within this share of the least are drawn among, the less loaded more often."""
LEAST_LOAD = 0.05
NEAR_TTFT_S = 5e-4
NEAR_DELAY = 1e-3
FAMILIAR_SHARE = 0.15
"""The same share for placements on workers that served the request's session last: they may have
more of its prefix than the index knows yet."""
MAX_PREFILL_CANDIDATES = 3
"""Prefill workers named to the decode worker: the chosen one, then those to try if it fails."""

W = TypeVar("W")

PreselectionRank: TypeAlias = float | tuple[bool, float]
"""Sort key of workers; those with the least are preselected."""


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
    chosen = pick_near_best(considered, query.familiar, rng)
    return PlacementChoice(chosen, alternative_prefills(chosen, considered), considered)


def placement_candidates(
    query: PlacementQuery,
    snapshot: PlacementSnapshot,
    goals: Objectives,
    best: PrefixSource | None,
) -> list[Placement]:
    """Return the placements on the preselected workers; ``best``: a prefix that any of them may
    fetch."""
    net, residents = snapshot.network, snapshot.resident_output

    def rank(w: DecodeState) -> PreselectionRank:
        return decode_rank(query, w.cached, w.batch, w.rows, w.kv_free, w.kv_total)

    reusable = attrgetter("reusable")
    near_p = preselect_workers(snapshot.prefill, reusable, attrgetter("busy_s"))
    near_d = preselect_workers(snapshot.decode, reusable, rank)
    prefill = [prefill_terms(w, best, query, net, goals) for w in near_p]
    found = []
    for worker in near_d:
        d = decode_terms(worker, query, goals, residents)
        own, stall = local_prefill_terms(worker, d, best, query, net, goals, residents)
        found.append(local_placement(own, d, stall, net, goals))
        found += remote_placements(prefill, d, query, net, goals)
    return found


def find_longest_prefix(snapshot: PlacementSnapshot) -> PrefixSource | None:
    """Return the longest cached prefix, of the worker that others could fetch it from soonest."""
    workers = [*snapshot.prefill, *(w.own for w in snapshot.decode)]
    most = max((w.cached for w in workers), default=0)
    if not most:
        return None
    sources = [
        PrefixSource(w.instance, most, source_wait_s(w))
        for w in snapshot.prefill
        if w.cached == most
    ]
    sources += [
        PrefixSource(w.instance, most, source_wait_s(w.own, decode_step_s(w)))
        for w in snapshot.decode
        if w.cached == most
    ]
    return min(sources, key=attrgetter("wait_s"))


def decode_rank(
    query: PlacementQuery, cached: int, batch: int, rows: int, kv_free: int, kv_total: int
) -> PreselectionRank:
    """Return the preselection rank of a decode worker with these values of its ``DecodeState``:
    workers with KV and a row for the request come first, then the least loaded.

    A batch of few requests with long contexts may fill a worker. If only such workers were looked
    at, the request would wait for one of them, and all those behind it as well."""
    need = query.tokens + query.output - usable_tokens(cached, query.tokens)
    lacks_room = (kv_total > 0 and kv_free < need) or 0 < rows <= batch
    return lacks_room, batch / rows if rows else float(batch)


def preselect_workers(
    workers: Sequence[W], reusable: Callable[[W], int], rank: Callable[[W], PreselectionRank]
) -> Sequence[W]:
    """Return at most PRESELECTED workers: half by overlap, the rest by their rank."""
    if len(workers) <= PRESELECTED:
        return workers
    holders = [w for w in workers if reusable(w)]
    kept = sorted(holders, key=lambda w: (-reusable(w), rank(w)))[: PRESELECTED // 2]
    by_rank = sorted(workers, key=rank)[:PRESELECTED]  # enough, as ``kept`` may be among them
    return (kept + [w for w in by_rank if w not in kept])[:PRESELECTED]


def pick_near_best(
    considered: Sequence[Placement], familiar: Collection[str], rng: Random
) -> Placement:
    """Return one of the least loaded placements whose cost and TTFT are near the best, on the
    ``familiar`` workers if some of these are near."""
    fitting = [c for c in considered if c.d.fits] or considered
    best = min(fitting, key=attrgetter("cost"))
    near = known_near(fitting, best, familiar) or near_placements(fitting, best, NEAR_BEST)
    least = min(c.load for c in near)
    equal = [c for c in near if c.load <= least * (1 + EQUAL_LOAD) + 1e-3]
    if len(equal) == 1:
        return equal[0]
    return rng.choices(equal, [(LEAST_LOAD + c.load) ** -2 for c in equal])[0]


def near_placements(
    placements: Sequence[Placement], best: Placement, share: float
) -> list[Placement]:
    """Return those whose cost, TTFT and compute are within ``share`` of the best; never none."""
    # Far below the objectives a prefix computed twice hardly shows in the cost, and where it is on
    # its way to another worker, not in TTFT either.
    ttft_s = best.ttft_s * (1 + share) + NEAR_TTFT_S
    delay = best.p.delay * (1 + share) + NEAR_DELAY
    cost = (best.cost - best.p.delay) * (1 + share)
    near = [
        c
        for c in placements
        if c.cost - c.p.delay <= cost and c.ttft_s <= ttft_s and c.p.delay <= delay
    ]
    return near or [best]  # a cost that is NaN compares with nothing


def known_near(
    placements: Sequence[Placement], best: Placement, familiar: Collection[str]
) -> list[Placement]:
    """Return the near placements with the most ``familiar`` workers, none without any."""
    if not familiar:
        return []
    ranked = [
        ((c.p.instance in familiar) + (c.decode in familiar), c)
        for c in near_placements(placements, best, FAMILIAR_SHARE)
    ]
    most = max(count for count, _ in ranked)
    return [c for count, c in ranked if count == most] if most else []


def alternative_prefills(chosen: Placement, considered: Sequence[Placement]) -> list[Placement]:
    """Return placements with other prefill workers for the same decode worker, best first."""
    if chosen.prefill is None:
        return []
    others = [c for c in considered if c.prefill not in (None, chosen.prefill)]
    same = [c for c in others if c.d is chosen.d]
    return heapq.nsmallest(MAX_PREFILL_CANDIDATES - 1, same, key=attrgetter("cost"))
