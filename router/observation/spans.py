"""Spans of one HTTP request, made at its end from the times that the router has in any case.

    POST /v1/chat/completions                         server span; its parent is the caller's span
      choice                                          one for each, from arrival to last token
        route | queue | prefill | first_emit          together: the time to the first token
                          wire | scatter              after it, where KV was handed over
        decode                                        from the first token to the last one

The stages are those of ``router.generation.submission``; times of workers are shifted to the
moment of their submission.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from router.generation.submission import Submission, event_timeline
from router.observation.access_log import MAX_PATH
from router.observation.request_record import ChoiceRecord, GenerationRecord, RequestRecord

MAX_CHOICES = 16
"""Choices of one request that get spans."""

AttributeValue = str | int | float

_STAGES = (
    ("route", "arrived", "routed"),
    ("queue", "routed", "prefill_started"),
    ("prefill", "prefill_started", "first_token"),
    ("first_emit", "first_token", "first_sent"),
    ("wire", "first_token", "kv_ready"),
    ("scatter", "kv_ready", "decode_started"),
    ("decode", "first_sent", "last_sent"),
)
_ERRORS_FROM = 500


class Span(NamedTuple):
    """One span of a trace, ready to be exported."""

    trace_id: bytes  # 16 bytes
    span_id: bytes  # 8 bytes
    parent_id: bytes  # 8 bytes; empty: none
    name: str
    is_server: bool
    start_ns: int  # since the epoch
    end_ns: int
    attributes: Mapping[str, AttributeValue]
    failed: bool = False


def request_spans(record: RequestRecord) -> list[Span]:
    """Return the spans of a request that has ended; none where the caller does not sample it."""
    parent = record.parent
    if parent is not None and not parent.sampled:
        return []
    root = Span(
        trace_id=secrets.token_bytes(16) if parent is None else parent.trace_id,
        span_id=secrets.token_bytes(8),
        parent_id=b"" if parent is None else parent.span_id,
        name=f"{record.method} {record.route}".rstrip(),
        is_server=True,
        start_ns=record.began_ns,
        end_ns=record.began_ns + _nanoseconds(record.ended - record.began),
        attributes=_request_attributes(record),
        failed=record.status >= _ERRORS_FROM or record.outcome.startswith("5"),
    )
    spans = [root]
    if record.generation is not None:
        for index, choice in enumerate(record.generation.choices[:MAX_CHOICES]):
            spans += _choice_spans(root, record, record.generation, index, choice)
    return spans


def _choice_spans(
    root: Span,
    record: RequestRecord,
    generation: GenerationRecord,
    index: int,
    choice: ChoiceRecord,
) -> Iterator[Span]:
    arrived_ns = record.began_ns + _nanoseconds(generation.arrived - record.began)
    times = _event_times(generation.arrived, choice)
    last_s = max(times.values())
    attributes = {"baton.choice": index, **_placement_attributes(choice.submissions)}
    span = root._replace(
        span_id=secrets.token_bytes(8),
        parent_id=root.span_id,
        name="choice",
        is_server=False,
        start_ns=arrived_ns,
        end_ns=arrived_ns + _nanoseconds(last_s),
        attributes=attributes,
        failed=False,
    )
    yield span
    for name, begin, end in _STAGES:
        if begin in times and end in times:
            start_s = times[begin]
            yield span._replace(
                span_id=secrets.token_bytes(8),
                parent_id=span.span_id,
                name=name,
                start_ns=arrived_ns + _nanoseconds(start_s),
                end_ns=arrived_ns + _nanoseconds(max(start_s, times[end])),
                attributes={},
            )


def _event_times(arrived: float, choice: ChoiceRecord) -> dict[str, float]:
    """Return the seconds of each event from the request's arrival."""
    times = event_timeline(arrived, choice.submissions)
    if "first_token" in times:  # as in ttft_stages: a worker may leave the start out
        times.setdefault("prefill_started", times["first_token"])
    if choice.first_token_s is not None:
        times["first_sent"] = choice.first_token_s
    if choice.last_token_s is not None:
        times["last_sent"] = choice.last_token_s
    return times


def _request_attributes(record: RequestRecord) -> dict[str, AttributeValue]:
    """Names of OpenTelemetry's semantic conventions (HTTP, GenAI), and Baton's own."""
    found: dict[str, AttributeValue] = {
        "http.request.method": record.method,
        "url.path": record.path[:MAX_PATH],
        "client.address": record.client,
        "baton.request_id": record.request_id,
    }
    if record.status:
        found["http.response.status_code"] = record.status
    texts = {
        "http.route": record.route,
        "baton.tenant": record.tenant,
        "baton.outcome": record.outcome,
    }
    found |= {name: text for name, text in texts.items() if text}
    generation = record.generation
    if generation is not None:
        found |= {
            "gen_ai.response.id": generation.response_id,
            "gen_ai.usage.input_tokens": generation.prompt_tokens,
            "gen_ai.usage.output_tokens": generation.output_tokens,
            "baton.cached_tokens": generation.cached_tokens,
        }
        if generation.first_token_s is not None:
            found["baton.time_to_first_token_s"] = generation.first_token_s
    return found


def _placement_attributes(submissions: Sequence[Submission]) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {"baton.attempts": len(submissions)}
    if submissions:
        last = submissions[-1]
        found["baton.decode_worker"] = last.chosen.decode
        found["baton.prefill_worker"] = last.prefill_instance
    return found


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
