"""Bounds on the head of a request: what comes before anybody looks at its path or its body.

Uvicorn and Serve's proxy take heads of other sizes; here the answer is the same behind both.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from router.errors import ApiError

MAX_TARGET = 8 * 1024
"""Bytes of path and query."""

MAX_HEADERS = 32 * 1024
"""Bytes of all header lines."""

_BESIDE = 4  # bytes of a header line that are neither name nor value


class HeadLimits:
    """Plain ASGI. 414 for a URL that is too long, 431 for headers that are too large."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = check_head(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error.response()(scope, receive, send)


def check_head(scope: Scope) -> ApiError | None:
    """What is too large of it, if anything."""
    target = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    if target > MAX_TARGET:
        return _refused(414, "URL", target, MAX_TARGET, "uri_too_long")
    size = sum(len(name) + len(value) + _BESIDE for name, value in scope["headers"])
    if size > MAX_HEADERS:
        return _refused(431, "headers", size, MAX_HEADERS, "headers_too_large")
    return None


def _refused(status: int, what: str, size: int, limit: int, code: str) -> ApiError:
    verb = "is" if what == "URL" else "are"
    # What may still come of the request is not worth reading.
    headers = {"connection": "close"}
    message = f"the {what} {verb} too large: {size} bytes, at most {limit} are taken"
    return ApiError(status, message, code=code, headers=headers)
