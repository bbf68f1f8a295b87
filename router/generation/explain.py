"""The response field ``baton``: where a request was placed and why (``x-baton-explain: 1``).

It holds the predictions for every candidate, the choice, and what happened; times in seconds.
``GenerationResponse`` adds it to a response on request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from router.generation.submission import Submission
from router.placement.cost import Placement
from router.placement.snapshot import Objectives

POLICY = "cost"
"""Value of the field ``policy``: the router has one routing policy."""


class CandidateReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """One possible placement with its predictions. ``prefill`` is None where the decode worker
    computes the prompt itself."""

    decode: str
    prefill: str | None
    prefill_cached_tokens: int
    decode_cached_tokens: int
    fits: bool
    load: float
    predicted: dict[str, float]
    fetch: dict[str, Any] | None = None


class AttemptOutcome(msgspec.Struct, frozen=True):
    """What happened. ``timeline``: events at the decode worker, since it had the request."""

    ttft_s: float | None  # from its submission
    timeline: dict[str, float]
    hand_over: dict[str, Any] | None


class AttemptReport(msgspec.Struct, frozen=True):
    """One submission of the choice with that index. ``chosen`` is one of the ``candidates``."""

    choice: int
    decision_s: float
    tokens: int
    expected_output: float
    chosen: CandidateReport
    observed: AttemptOutcome
    candidates: list[CandidateReport]


class Explanation(msgspec.Struct, frozen=True):
    """The response field ``baton``. ``timeline`` has the events of each choice in seconds from the
    request's arrival (``x-baton-timeline: 1``); ``x-baton-explain: 1`` requests the rest."""

    policy: str | UnsetType = UNSET
    objectives: dict[str, float] | UnsetType = UNSET
    attempts: list[AttemptReport] | UnsetType = UNSET
    timeline: list[dict[str, float]] | UnsetType = UNSET


def explain_submissions(
    goals: Objectives, submissions: Sequence[tuple[int, Submission]]
) -> Explanation:
    """Return the explanation of ``submissions``, each with the index of its choice."""
    return Explanation(
        POLICY, goals._asdict(), [_attempt_report(*submission) for submission in submissions]
    )


def _attempt_report(choice: int, submission: Submission) -> AttemptReport:
    placed = submission.placed
    ranked = sorted(placed.choice.considered, key=lambda c: c.cost)
    return AttemptReport(
        choice=choice,
        decision_s=placed.seconds,
        tokens=placed.query.tokens,
        expected_output=placed.query.output,
        chosen=_candidate_report(submission.chosen),
        observed=AttemptOutcome(
            submission.first_token_s, submission.timeline, _hand_over(submission)
        ),
        candidates=[_candidate_report(c) for c in ranked],
    )


def _candidate_report(placement: Placement) -> CandidateReport:
    return CandidateReport(
        decode=placement.decode,
        prefill=placement.prefill,
        prefill_cached_tokens=placement.p.cached,
        decode_cached_tokens=placement.d.cached,
        fits=placement.d.fits,
        load=placement.load,
        predicted=placement.terms,
        fetch=placement.p.fetch._asdict() if placement.p.fetch else None,
    )


def _hand_over(submission: Submission) -> dict[str, Any] | None:
    measured = submission.measured
    if measured is None:
        return None
    names = ("prefill_instance", "kv_tokens", "kv_bytes", "tail_bytes", "tail_seconds")
    return {name: getattr(measured, name) for name in names}
