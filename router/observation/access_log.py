"""The access log: one JSON line for each HTTP request. ``router.access_log`` names the file."""

from __future__ import annotations

import msgspec

from router.common.json_lines_log import JsonLinesLog
from router.observation.request_record import RequestRecord

MAX_PATH = 200
"""Characters of a path that the log keeps. Queries are not logged."""


class AccessLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. The fields from ``tenant`` on belong to requests for generated tokens, most of them
    to requests that were let in."""

    time: float  # of the end, seconds since the epoch
    request_id: str
    client: str
    method: str
    path: str
    status: int  # of the HTTP response; 0: the client hung up before it
    seconds: float
    tenant: str = ""
    outcome: str = ""  # ok, cancelled, or the HTTP status of its error, also of one in a stream
    response_id: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft_s: float | None = None
    attempts: int | None = None  # submissions to decode workers


def access_line(record: RequestRecord) -> AccessLine:
    """Return the line of a request that has ended."""
    seconds = record.ended - record.began
    line = AccessLine(
        time=round(record.began_ns / 1e9 + seconds, 6),
        request_id=record.request_id,
        client=record.client,
        method=record.method,
        path=record.path[:MAX_PATH],
        status=record.status,
        seconds=round(seconds, 6),
        tenant=record.tenant,
        outcome=record.outcome,
    )
    generation = record.generation
    if generation is None:
        return line
    first_s = generation.first_token_s
    return msgspec.structs.replace(
        line,
        response_id=generation.response_id,
        prompt_tokens=generation.prompt_tokens,
        cached_tokens=generation.cached_tokens,
        output_tokens=generation.output_tokens,
        ttft_s=None if first_s is None else round(first_s, 6),
        attempts=sum(len(choice.submissions) for choice in generation.choices),
    )


def open_access_log(path: str) -> JsonLinesLog:
    """Raises StartupError for a file that cannot be opened."""
    return JsonLinesLog(path, "router.access_log")
