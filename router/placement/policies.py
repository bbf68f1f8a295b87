"""Routing policies by name. ``cost`` is the one to use; the others are there to compare it with.

A simple policy picks workers by its own rule, and leaves it to the decode worker's setting when a
prompt is computed there. What the cost function predicts of its pick is told all the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Literal, Protocol, TypeAlias

from router.placement.choose import MAX_PREFILL, Choice, candidates, choose
from router.placement.snapshot import DecodeState, Objectives, PrefillState, Query, Snapshot

PolicyName: TypeAlias = Literal["cost", "round-robin", "least-loaded", "overlap-only"]


class Policy(Protocol):
    def __call__(self, query: Query, snapshot: Snapshot, goals: Objectives) -> Choice | None:
        """A placement; None when there is no decode worker."""


def policy(name: PolicyName, chance: Random) -> Policy:
    if name == "cost":
        return partial(_cost, chance)
    if name == "round-robin":
        return _RoundRobin()
    return _by_rank if name == "least-loaded" else _by_overlap


def _cost(chance: Random, query: Query, snapshot: Snapshot, goals: Objectives) -> Choice | None:
    return choose(query, snapshot, goals, chance)


class _RoundRobin:
    """The next of each kind, whoever it is."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def __call__(self, query: Query, snapshot: Snapshot, goals: Objectives) -> Choice | None:
        turn = next(self._turns)
        prefill = [*snapshot.prefill[turn % max(1, len(snapshot.prefill)) :], *snapshot.prefill]
        decode = snapshot.decode[turn % len(snapshot.decode)] if snapshot.decode else None
        return _picked(prefill, decode, query, snapshot, goals)


def _by_rank(query: Query, snapshot: Snapshot, goals: Objectives) -> Choice | None:
    """Each kind's least loaded: prompts queued, requests under way."""
    return _ordered(lambda w: w.queue_s, lambda w: w.batch, query, snapshot, goals)


def _by_overlap(query: Query, snapshot: Snapshot, goals: Objectives) -> Choice | None:
    """Each kind's longest prefix, however busy; the less loaded where none is longer."""
    return _ordered(
        lambda w: (-w.cached, w.queue_s),
        lambda w: (-w.cached, w.batch),
        *(query, snapshot, goals),
    )


def _ordered(
    prefill_rank: Callable[[PrefillState], float | tuple[float, float]],
    decode_rank: Callable[[DecodeState], float | tuple[float, float]],
    query: Query,
    snapshot: Snapshot,
    goals: Objectives,
) -> Choice | None:
    def place(worker: DecodeState) -> tuple[bool, float | tuple[float, float], str]:
        room = query.tokens + query.output - worker.cached
        full = worker.kv_total > 0 and worker.kv_free < room
        return full, decode_rank(worker), worker.instance

    # The instance decides between equals: not in order, but the same way for each router.
    prefill = sorted(snapshot.prefill, key=lambda w: (prefill_rank(w), w.instance))
    decode = min(snapshot.decode, key=place, default=None)
    return _picked(prefill, decode, query, snapshot, goals)


def _picked(
    prefill: Sequence[PrefillState],
    decode: DecodeState | None,
    query: Query,
    snapshot: Snapshot,
    goals: Objectives,
) -> Choice | None:
    """``prefill``: in the order of preference."""
    if decode is None:
        return None
    order = list({w.instance: w for w in prefill}.values())[:MAX_PREFILL]
    narrowed = snapshot._replace(prefill=order, decode=[decode])
    considered = candidates(query, narrowed, goals, None)
    remote = [c for c in considered if c.prefill is not None]
    return Choice((remote or considered)[0], remote[1:], considered)
