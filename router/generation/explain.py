"""Why a request went where it did, for a caller who asks (``x-baton-explain: 1``).

What was predicted of every candidate, which was chosen, and what happened; times in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from router.generation.attempt import Attempt
from router.placement.cost import Placement
from router.placement.snapshot import Objectives


class Candidate(msgspec.Struct, frozen=True, omit_defaults=True):
    """``prefill`` is None where the decode worker computes the prompt itself."""

    decode: str
    prefill: str | None
    prefill_cached_tokens: int
    decode_cached_tokens: int
    fits: bool
    load: float
    predicted: dict[str, float]
    fetch: dict[str, Any] | None = None


class Observed(msgspec.Struct, frozen=True):
    """``timeline``: at the decode worker, since it had the request."""

    ttft_s: float | None  # from its submission
    timeline: dict[str, float]
    hand_over: dict[str, Any] | None


class Tried(msgspec.Struct, frozen=True):
    """One attempt, of the choice of that index. ``chosen`` is one of the ``candidates``."""

    choice: int
    decision_s: float
    tokens: int
    expected_output: float
    chosen: Candidate
    observed: Observed
    candidates: list[Candidate]


class Explanation(msgspec.Struct, frozen=True):
    """The answer's field ``baton``. ``timeline``: seconds from the request's arrival of its events,
    for each choice (``x-baton-timeline: 1``); the rest is what ``x-baton-explain: 1`` asks for."""

    policy: str | UnsetType = UNSET
    objectives: dict[str, float] | UnsetType = UNSET
    attempts: list[Tried] | UnsetType = UNSET
    timeline: list[dict[str, float]] | UnsetType = UNSET


def explain(policy: str, goals: Objectives, attempts: Sequence[tuple[int, Attempt]]) -> Explanation:
    """``attempts``: each with the index of its choice."""
    return Explanation(policy, goals._asdict(), [_tried(*attempt) for attempt in attempts])


def _tried(choice: int, attempt: Attempt) -> Tried:
    placed = attempt.placed
    ranked = sorted(placed.choice.considered, key=lambda c: c.cost)
    return Tried(
        choice=choice,
        decision_s=placed.seconds,
        tokens=placed.query.tokens,
        expected_output=placed.query.output,
        chosen=_candidate(attempt.chosen),
        observed=Observed(attempt.first_token_s, attempt.timeline, _hand_over(attempt)),
        candidates=[_candidate(c) for c in ranked],
    )


def _candidate(placement: Placement) -> Candidate:
    return Candidate(
        decode=placement.decode,
        prefill=placement.prefill,
        prefill_cached_tokens=placement.p.cached,
        decode_cached_tokens=placement.d.cached,
        fits=placement.d.fits,
        load=placement.load,
        predicted=placement.terms._asdict(),
        fetch=placement.p.fetch._asdict() if placement.p.fetch else None,
    )


def _hand_over(attempt: Attempt) -> dict[str, Any] | None:
    measured = attempt.measured
    if measured is None:
        return None
    names = ("prefill_instance", "kv_tokens", "kv_bytes", "tail_bytes", "tail_seconds")
    return {name: getattr(measured, name) for name in names}
