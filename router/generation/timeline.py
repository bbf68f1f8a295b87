"""Where the time of a request went: its events, and the stages of its time to first token.

    arrived -> routed -> prefill_queued -> prefill_started -> first_token -> kv_ready
            -> decode_started -> finished

    route | queue (from routed) | prefill | first_emit     together: the time to first token
    wire, scatter                                          after it, where KV was handed over

The first token does not wait for KV: what ``wire`` and ``scatter`` take lies before the second one.
Events at a decode worker are told on its own clock, from when it had the request; the way there is
therefore in ``first_emit``, with the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.generation.attempt import Attempt
from router.placement.snapshot import Objectives

AT_WORKER = (
    *("prefill_queued", "prefill_started", "first_token", "kv_ready", "decode_started"),
    "finished",
)


def timeline(arrived: float, attempts: Sequence[Attempt]) -> dict[str, float]:
    """Seconds from ``arrived`` (time.perf_counter) of each event that there was, by the attempt
    that brought the first token. Without a hand-over there is no kv_ready and decode_started."""
    events = {"arrived": 0.0}
    attempt = _first(attempts) or (attempts[-1] if attempts else None)
    if attempt is not None:
        routed = events["routed"] = attempt.submitted - arrived
        marks = attempt.timeline
        events |= {name: routed + marks[name] for name in AT_WORKER if name in marks}
    return {name: round(seconds, 6) for name, seconds in events.items()}


def stages(arrived: float, first_s: float, attempts: Sequence[Attempt]) -> dict[str, float]:
    """Seconds by stage of a request whose first token was there ``first_s`` after it had arrived;
    empty where its worker has not told."""
    attempt = _first(attempts)
    if attempt is None or "first_token" not in attempt.timeline:
        return {}
    marks = attempt.timeline
    route, first = attempt.submitted - arrived, marks["first_token"]
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


def _first(attempts: Sequence[Attempt]) -> Attempt | None:
    """The attempt that brought the first token; what failed before it counts as routing."""
    return next((a for a in attempts if a.first_token_s is not None), None)


# MERGED router.slo
# Which objectives a request that has ended is weighed by, and whether it met them.
#
# first token came            ttft: met or missed                  tpot: by the tokens after it
# none came, for too long     ttft: missed, though the client gave up
# ended well                  all: met, if each of the others is
# ended by an error (5xx)     all: missed
# given up, or refused        all: missed, if one of the others is by then; else nobody knows
# wrong of the client (4xx)   by none, but what came before

SLOS = ("ttft", "tpot", "all")


class Times(NamedTuple):
    """Of a request, in seconds: from its arrival to its end; to its first token, None: there was
    none; of each token after it, on average, None: there was none."""

    whole_s: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None


def weighed(status: str, times: Times, goals: Objectives) -> dict[str, bool]:
    """Met or missed, by the objective's name; what is not in it does not count. ``status``: ok,
    cancelled, or the HTTP status of its error."""
    found = {}
    if times.ttft_s is not None:
        found["ttft"] = times.ttft_s <= goals.ttft_s
    elif status == "504" or (_is_owed(status) and times.whole_s > goals.ttft_s):
        found["ttft"] = False
    if times.tpot_s is not None:
        found["tpot"] = times.tpot_s <= goals.tpot_s
    if status == "ok" and not found:
        return {}  # the prompt alone was wanted
    well = all(found.values())
    if status == "ok" or status.startswith("5") or not well:
        found["all"] = status == "ok" and well
    return found


def _is_owed(status: str) -> bool:
    """It should have had a token, had it been quick enough: all but what the client did wrong.
    An answer without one (ok) was to have none."""
    return status in ("cancelled", "429") or status.startswith("5")
