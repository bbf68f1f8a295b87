"""Failures of ``/v1/responses`` that clients can act on only inside a stream.

Codex compacts a conversation that is too long, and waits before it retries a refusal, where the
stream says so; the same error as a 400 or a 429 ends its turn. Other errors before the first event
keep their HTTP status, which clients handle well.
"""

from __future__ import annotations

from router.common.errors import RETRY_AFTER, ApiError
from router.openai.responses.response_json import ResponseFailure

_TOO_LONG = "context_length_exceeded"


def is_told_in_stream(error: ApiError) -> bool:
    """Return whether a client that streams gets the error as an event, with status 200."""
    return error.status == 429 or error.code == _TOO_LONG


def failure_of(error: ApiError) -> ResponseFailure:
    """Return the error of a failed response. A refusal under load says when to come again, in the
    words from which Codex reads the time."""
    if error.status == 429:
        seconds = error.headers.get("retry-after", RETRY_AFTER["retry-after"])
        message = error.message
        if "try again in" not in message:
            message = f"{message}; try again in {seconds}s"
        return ResponseFailure("rate_limit_exceeded", message)
    if error.code == _TOO_LONG:
        return ResponseFailure(_TOO_LONG, error.message)
    return ResponseFailure(
        "invalid_prompt" if error.status < 500 else "server_error", error.message
    )
