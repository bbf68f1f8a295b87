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

from router.attempt import Attempt

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
