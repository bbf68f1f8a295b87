"""Errors in Anthropic's format: ``{"type": "error", "error": {"type", "message"}, "request_id"}``.

Clients act on them: Claude Code compacts a conversation on the words ``prompt is too long``, and
retries 429, 529 and 5xx after ``retry-after`` seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from fastapi import Response

from router.common.errors import MAX_RETRY_AFTER_S, ApiError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_OVERLOADED = 529
"""Anthropic's status for a server with too much work; 429 is a limit of the client."""


def error_status(error: ApiError) -> int:
    """Return the HTTP status of an error in this dialect."""
    return _OVERLOADED if error.status == 429 and error.code == "overloaded" else error.status


def error_body(error: ApiError, request_id: str = "") -> bytes:
    """Return the JSON of an error response, or of an error event in a stream."""
    status = error_status(error)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode(
        {
            "type": "error",
            "error": {"type": kind, "message": _message(error)},
            "request_id": request_id or None,
        }
    )


def error_response(error: ApiError, request_id: str) -> Response:
    body, headers = error_body(error, request_id), _bounded(error.headers)
    return Response(body, error_status(error), headers, "application/json")


def _message(error: ApiError) -> str:
    if error.code != "context_length_exceeded":
        return error.message
    if error.overflow is None:
        return f"prompt is too long: {error.message}"
    tokens, most = error.overflow
    return f"prompt is too long: {tokens} tokens > {most} maximum"


def _bounded(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers with a ``retry-after`` that clients obey: they ignore longer ones."""
    out = dict(headers)
    after = out.get("retry-after", "")
    if after.isdecimal():
        out["retry-after"] = str(min(int(after), MAX_RETRY_AFTER_S))
    return out
