"""Bounds on the head of a request: what comes before anybody looks at its path or its body.

Uvicorn and Serve's proxy take heads of other sizes; here the answer is the same behind both.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.common.errors import ApiError, invalid

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


# MERGED router.limits_unread
# An end to answers that nobody reads: uvicorn's protocol, with a bound on how long it may wait.
#
#     writing --64 KiB wait beside what the system holds--> paused --read by then--> writing
#                                                             | nothing of it within
#                                                             unread_timeout_s
#                                                             +--> cut: the connection is reset
#
# By itself uvicorn waits as long as the client does not hang up, and with it the request's place in
# the router and all that was computed for it. To be cut a client must read very slowly: in this
# time
# not what separates the marks of the transport's buffer (48 KiB).


class UnreadLimit(HttpToolsProtocol):
    unread_timeout_s = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unread: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_unread()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The application's next ``send`` waits from here on."""
        super().pause_writing()
        # Not close(): that would wait until the rest is read, too.
        self._unread = self.loop.call_later(self.unread_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_unread()
        super().resume_writing()

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


# MERGED router.limits_connection
# Bounds on a connection: uvicorn's protocol, with an end to what is neither body nor request.
#
#     open ---head complete within head_timeout_s--> uvicorn's
#      | not HTTP: 400    too large: 431    too slow: 408
#      +--> refused: the answer is sent, what still comes is thrown away for LINGER_S, closed
#
# By itself uvicorn waits for a head for ever, keeps all of it, and answers in plain text.

MAX_HEAD = 2 * (MAX_TARGET + MAX_HEADERS)
"""Bytes after which nobody waits for the end of a head, or of what is sent between two pieces of a
body. Smaller ones that are still too large get a better answer (``limits``)."""

LINGER_S = 1.0
"""To close at once, with something unread, would take the answer from the client, too."""

FIRST_S = 1.0
"""For a first request to come from who is connected when the server stops."""

_PHRASES = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


class GuardedProtocol(UnreadLimit):
    """``head_timeout_s``: set by ``guarded``."""

    head_timeout_s = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = 0  # bytes since the last piece of a body, or the end of a head or a request
        self._refused = False
        self._timer: asyncio.TimerHandle | None = None
        self._wait_for_head()

    def shutdown(self) -> None:
        """The server stops: who has not sent a request yet may be about to."""
        cycle: object = self.cycle  # None before the first, whatever its type says
        if cycle is None and not self._refused:
            self.loop.call_later(FIRST_S, super().shutdown)
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._since += len(data)
        super().data_received(data)
        if self._since > MAX_HEAD and not self._refused:
            message = f"the headers are too large: more than {MAX_HEAD} bytes came without an end"
            self._refuse(ApiError(431, message, code="headers_too_large"))

    def eof_received(self) -> None:
        if self._refused:
            self.transport.close()
        return super().eof_received()

    def send_400_response(self, msg: str) -> None:
        self._refuse(invalid("the request is not valid HTTP/1.1", code="invalid_http"))

    def on_message_begin(self) -> None:
        self._wait_for_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._since = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._since = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._since = 0
        super().on_message_complete()

    def _wait_for_head(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.head_timeout_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        if not self._since:
            self.transport.close()  # nothing was asked
            return
        message = f"the headers did not come within {self.head_timeout_s:g} s"
        self._refuse(ApiError(408, message, code="request_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Answer, unless another answer is on its way, and hang up."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._stop_timer()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started or not cycle.more_body:
                self.transport.close()  # uvicorn tells the application
                return
            cycle.disconnected = True  # it waits for a body that nobody can read
            cycle.message_event.set()
        body = error.body()
        head = (
            f"HTTP/1.1 {error.status} {_PHRASES[error.status]}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


def guarded(head_timeout_s: float) -> type[GuardedProtocol]:
    """For uvicorn's ``http``."""
    name = GuardedProtocol.__name__
    return type(name, (GuardedProtocol,), {"head_timeout_s": head_timeout_s})
