"""Times of one request, as pure functions: its events, the stages of its TTFT, its objectives.

    arrived -> routed -> prefill_queued -> prefill_started -> first_token -> kv_ready
            -> decode_started -> finished

    route | queue (from routed) | prefill | first_emit     together: the time to first token
    wire, scatter                                          after it, where KV was handed over

The first token does not wait for KV: ``wire`` and ``scatter`` lie before the second token. Events
at a decode worker are measured on its own clock, from when it had the request; the way there is
therefore part of ``first_emit``, with the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.generation.submission import Submission
from router.placement.snapshot import Objectives

WORKER_EVENTS = (
    *("prefill_queued", "prefill_started", "first_token", "kv_ready", "decode_started"),
    "finished",
)

SLOS = ("ttft", "tpot", "all")


def event_timeline(arrived: float, submissions: Sequence[Submission]) -> dict[str, float]:
    """Return the seconds from ``arrived`` (time.perf_counter) of each event that happened.

    They come from the submission that brought the first token. Without a hand-over there is no
    kv_ready and no decode_started.
    """
    events = {"arrived": 0.0}
    submission = _first_to_answer(submissions) or (submissions[-1] if submissions else None)
    if submission is not None:
        routed = events["routed"] = submission.submitted - arrived
        marks = submission.timeline
        events |= {name: routed + marks[name] for name in WORKER_EVENTS if name in marks}
    return {name: round(seconds, 6) for name, seconds in events.items()}


def ttft_stages(
    arrived: float, first_s: float, submissions: Sequence[Submission]
) -> dict[str, float]:
    """Return the seconds of each stage of a request.

    ``first_s``: seconds from its arrival to its first token. Empty where the worker sent no times.
    """
    submission = _first_to_answer(submissions)
    if submission is None or "first_token" not in submission.timeline:
        return {}
    marks = submission.timeline
    route, first = submission.submitted - arrived, marks["first_token"]
    started = min(first, marks.get("prefill_started", first))
    found = {
        "route": route,
        "queue": started,
        "prefill": first - started,
        "first_emit": first_s - route - first,
    }
    if "kv_ready" in marks:
        found["wire"] = marks["kv_ready"] - first
        if "decode_started" in marks:
            found["scatter"] = marks["decode_started"] - marks["kv_ready"]
    return {name: max(0.0, seconds) for name, seconds in found.items()}


def _first_to_answer(submissions: Sequence[Submission]) -> Submission | None:
    """The submission that brought the first token; those that failed before count as routing."""
    return next((s for s in submissions if s.first_token_s is not None), None)


class RequestTimes(NamedTuple):
    """Measured times of a request in seconds, from its arrival."""

    whole_s: float = 0.0  # to its end
    ttft_s: float | None = None  # to its first token; None: there was none
    tpot_s: float | None = None  # mean of each token after the first; None: there was none


def slo_verdicts(status: str, times: RequestTimes, goals: Objectives) -> dict[str, bool]:
    """Return whether each objective was met; objectives that do not count are left out.

    ``status``: ok, cancelled, or the HTTP status of its error.

    first token came            ttft: met or missed                  tpot: by the tokens after it
    none came, for too long     ttft: missed, though the client gave up
    ended well                  all: met, if each of the others is
    ended by an error (5xx)     all: missed
    given up, or refused        all: missed, if one of the others is by then; else unknown
    client's error (4xx)        only what came before counts
    """
    found = {}
    if times.ttft_s is not None:
        found["ttft"] = times.ttft_s <= goals.ttft_s
    elif status == "504" or (_expected_token(status) and times.whole_s > goals.ttft_s):
        found["ttft"] = False
    if times.tpot_s is not None:
        found["tpot"] = times.tpot_s <= goals.tpot_s
    if status == "ok" and not found:
        return {}  # only the prompt was requested
    met_all = all(found.values())
    if status == "ok" or status.startswith("5") or not met_all:
        found["all"] = status == "ok" and met_all
    return found


def _expected_token(status: str) -> bool:
    """Whether a quick cluster would have sent a token. A response without one (ok) has none due."""
    return status in ("cancelled", "429") or status.startswith("5")
