"""``RequestRecord``: what one HTTP request was and brought, for the access log and for traces.

    RequestEdge --begin--> GenerationResponse adds ``generation`` --end--> RequestObserver

It is written once, at the end of the request: a token that is streamed costs it nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from starlette.types import Scope

from router.generation.submission import Submission

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?\Z")
_SAMPLED = 1


class TraceParent(NamedTuple):
    """The caller's span, from the header ``traceparent`` (W3C Trace Context)."""

    trace_id: bytes  # 16 bytes
    span_id: bytes  # 8 bytes
    sampled: bool


def parse_traceparent(value: str) -> TraceParent | None:
    """Return the caller's span, or None for a header that is not valid, which is ignored."""
    match = _TRACEPARENT.match(value)
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    trace_id, span_id = bytes.fromhex(match[2]), bytes.fromhex(match[3])
    if not any(trace_id) or not any(span_id):
        return None
    return TraceParent(trace_id, span_id, bool(int(match[4], 16) & _SAMPLED))


class ChoiceRecord(NamedTuple):
    """Times of one choice in seconds from the request's arrival; None: it did not happen."""

    first_token_s: float | None
    last_token_s: float | None
    submissions: Sequence[Submission]


def choice_record(
    arrived: float, token_times: tuple[float, float] | None, submissions: Sequence[Submission]
) -> ChoiceRecord:
    """``token_times``: of the first and the last token, on time.perf_counter as ``arrived``."""
    if token_times is None:
        return ChoiceRecord(None, None, submissions)
    first, last = token_times
    return ChoiceRecord(first - arrived, last - arrived, submissions)


class GenerationRecord(NamedTuple):
    """What a request for generated tokens brought that was let in."""

    arrived: float  # on time.perf_counter
    response_id: str
    outcome: str  # ok, cancelled, or the HTTP status of its error, also of one inside a stream
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    choices: Sequence[ChoiceRecord]

    @property
    def first_token_s(self) -> float | None:
        """Return the seconds from the arrival to the first token of any choice."""
        times = [c.first_token_s for c in self.choices if c.first_token_s is not None]
        return min(times, default=None)


@dataclass
class RequestRecord:
    """One HTTP request. Created by ``RequestObserver.begin``, completed as the request goes on."""

    request_id: str
    method: str
    path: str
    client: str  # address of the peer: a proxy's, if there is one
    began: float  # on time.perf_counter
    began_ns: int  # since the epoch
    parent: TraceParent | None
    status: int = 0  # of the HTTP response; 0: none was sent
    ended: float = 0.0  # on time.perf_counter
    route: str = ""  # the path with names of its parameters; empty: no route matched
    tenant: str = ""  # of a request for generated tokens, once its API key is known
    refusal: str = ""  # HTTP status of an error that a whole stream of status 200 reports
    generation: GenerationRecord | None = field(default=None)

    @property
    def outcome(self) -> str:
        """Return ok, cancelled, or the HTTP status of an error; empty where ``status`` says it."""
        return self.refusal if self.generation is None else self.generation.outcome


def record_of(scope: Scope) -> RequestRecord | None:
    """Return the record of a request; None where requests are not recorded."""
    record: RequestRecord | None = scope.get("state", {}).get("record")
    return record
