"""Simple routing policies to compare the cost function with, and a router that uses one of them.

    python -m bench.lib.routing_policies router --routing-policy round-robin --port 8000 ...

runs ``baton router`` with the named policy in place of ``choose_placement``; all other options are
those of the command. A policy picks workers by its own rule; the cost function's prediction for its
choice is reported all the same.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import TypeAlias
from unittest import mock

from cluster.cli.main import app
from router.placement.choose import (
    MAX_PREFILL_CANDIDATES,
    ChoosePlacement,
    PlacementChoice,
    choose_placement,
    placement_candidates,
)
from router.placement.snapshot import (
    DecodeState,
    Objectives,
    PlacementQuery,
    PlacementSnapshot,
    PrefillState,
)

Rank: TypeAlias = float | tuple[float, float]


class RoundRobin:
    """Chooses the next worker of each pool, regardless of load and cache."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def __call__(
        self, query: PlacementQuery, snapshot: PlacementSnapshot, goals: Objectives, rng: Random
    ) -> PlacementChoice | None:
        turn = next(self._turns)
        prefill = [*snapshot.prefill[turn % max(1, len(snapshot.prefill)) :], *snapshot.prefill]
        decode = snapshot.decode[turn % len(snapshot.decode)] if snapshot.decode else None
        return _placement(prefill, decode, query, snapshot, goals)


def least_loaded(
    query: PlacementQuery, snapshot: PlacementSnapshot, goals: Objectives, rng: Random
) -> PlacementChoice | None:
    """Choose the worker of each pool with the shortest queue or the fewest requests."""
    return _by_rank(lambda w: w.busy_s, lambda w: w.batch, query, snapshot, goals)


def overlap_only(
    query: PlacementQuery, snapshot: PlacementSnapshot, goals: Objectives, rng: Random
) -> PlacementChoice | None:
    """Choose the worker of each pool with the longest cached prefix; on a tie the less loaded."""
    return _by_rank(
        lambda w: (-w.cached, w.busy_s),
        lambda w: (-w.cached, w.batch),
        *(query, snapshot, goals),
    )


POLICIES: Mapping[str, ChoosePlacement] = {
    "cost": choose_placement,
    "round-robin": RoundRobin(),
    "least-loaded": least_loaded,
    "overlap-only": overlap_only,
}


def _by_rank(
    prefill_rank: Callable[[PrefillState], Rank],
    decode_rank: Callable[[DecodeState], Rank],
    query: PlacementQuery,
    snapshot: PlacementSnapshot,
    goals: Objectives,
) -> PlacementChoice | None:
    def order(worker: DecodeState) -> tuple[bool, Rank, str]:
        need = query.tokens + query.output - worker.cached
        full = worker.kv_total > 0 and worker.kv_free < need
        return full, decode_rank(worker), worker.instance

    # Ties are broken by the instance, so that every router breaks them the same way.
    prefill = sorted(snapshot.prefill, key=lambda w: (prefill_rank(w), w.instance))
    decode = min(snapshot.decode, key=order, default=None)
    return _placement(prefill, decode, query, snapshot, goals)


def _placement(
    prefill: Sequence[PrefillState],
    decode: DecodeState | None,
    query: PlacementQuery,
    snapshot: PlacementSnapshot,
    goals: Objectives,
) -> PlacementChoice | None:
    """Return the placement on the first of ``prefill`` and on ``decode``."""
    if decode is None:
        return None
    order = list({w.instance: w for w in prefill}.values())[:MAX_PREFILL_CANDIDATES]
    narrowed = snapshot._replace(prefill=order, decode=[decode])
    considered = placement_candidates(query, narrowed, goals, None)
    remote = [c for c in considered if c.prefill is not None]
    return PlacementChoice((remote or considered)[0], remote[1:], considered)


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--routing-policy", choices=POLICIES, required=True)
    given, sys.argv[1:] = parser.parse_known_args()
    with mock.patch("router.generation.placer.choose_placement", POLICIES[given.routing_policy]):
        app()


if __name__ == "__main__":
    main()
