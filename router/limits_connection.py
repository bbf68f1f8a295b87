"""Bounds on a connection: uvicorn's protocol, with an end to what is neither body nor request.

    open ---head complete within head_timeout_s--> uvicorn's
     | not HTTP: 400    too large: 431    too slow: 408
     +--> refused: the answer is sent, what still comes is thrown away for LINGER_S, closed

By itself uvicorn waits for a head for ever, keeps all of it, and answers in plain text.
"""

from __future__ import annotations

import asyncio

from router.errors import ApiError, invalid
from router.limits import MAX_HEADERS, MAX_TARGET
from router.limits_unread import UnreadLimit

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
