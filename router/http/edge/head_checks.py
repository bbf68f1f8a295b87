"""``HeadChecks``: which heads of requests the router takes, whatever they ask for.

ASGI middleware of ``create_app``: uvicorn and Serve's proxy have limits of their own, and behind
both the router must answer alike.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from protocol.security.host_header import AllowedHosts
from router.common.errors import ApiError, WriteError, write_openai_error

MAX_TARGET = 8 * 1024
"""Bytes of path and query."""

MAX_HEADERS = 32 * 1024
"""Bytes of all header lines."""

_HEADER_OVERHEAD = 4  # bytes of a header line that are neither name nor value


class HeadChecks:
    """ASGI middleware: 414 for a URL that is too long, 431 for headers that are too large, 421 for
    a host that is not this one.

    ``hosts`` is None where any host is taken: without an API key the web page of a stranger learns
    nothing, whatever name it reaches the router by. ``write``: returns the response for an error.
    """

    def __init__(
        self, app: ASGIApp, hosts: AllowedHosts | None, write: WriteError = write_openai_error
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = check_head(scope, self._hosts) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await self._write(scope, error)(scope, receive, send)


def check_head(scope: Scope, hosts: AllowedHosts | None = None) -> ApiError | None:
    """Return the error of a head that is not taken, else None."""
    target = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    if target > MAX_TARGET:
        return _too_large(414, "URL", target, MAX_TARGET, "uri_too_long")
    size = sum(len(name) + len(value) + _HEADER_OVERHEAD for name, value in scope["headers"])
    if size > MAX_HEADERS:
        return _too_large(431, "headers", size, MAX_HEADERS, "headers_too_large")
    if hosts is not None:
        for name, value in scope["headers"]:
            if name == b"host" and not hosts.permit(value):
                return _misdirected(value)
    return None


def _too_large(status: int, what: str, size: int, limit: int, code: str) -> ApiError:
    verb = "is" if what == "URL" else "are"
    headers = {"connection": "close"}  # the rest of the request is not read
    message = f"the {what} {verb} too large: {size} bytes, at most {limit} are accepted"
    return ApiError(status, message, code=code, headers=headers)


def _misdirected(value: bytes) -> ApiError:
    host = value[:80].decode("latin-1")
    message = (
        f"this router does not serve the host {host!r}: expected localhost, an IP address, or a"
        " name in security.allowed_hosts"
    )
    return ApiError(421, message, code="host_not_allowed", headers={"connection": "close"})
