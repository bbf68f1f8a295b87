"""Limits of HTTP connections: bytes and time of heads, time for unread responses.

``limited_protocol`` is the uvicorn protocol of ``RouterServer``. ``edge.head_checks`` says
which complete heads are taken.
"""

from __future__ import annotations

import asyncio

from router.common.errors import ApiError, invalid
from router.connections.connection_table import ConnectionSlot
from router.http.edge.head_checks import MAX_HEADERS, MAX_TARGET
from router.http.pipelining import PipeliningProtocol

MAX_HEAD = 2 * (MAX_TARGET + MAX_HEADERS)
"""Bytes after which a connection is refused without an end of the head, or between two pieces of a
body. Smaller heads that are still too large get a better error from ``check_head``."""

LINGER_S = 1.0
"""Time before a refused connection is closed: closing at once with unread data would reset it, and
the client would lose the response."""

FIRST_REQUEST_S = 1.0
"""Time for the first request of a client that is connected when the server stops."""

_PHRASES = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


class UnreadTimeoutProtocol(PipeliningProtocol):
    """Uvicorn's protocol with a limit on the time that a response may wait to be read.

    writing --64 KiB wait beyond the socket's buffers--> paused --read in time--> writing
                                                            | nothing read within
                                                            | unread_timeout_s
                                                            +--> aborted: the connection is reset

    Uvicorn itself waits as long as the client stays connected, and keeps the request's place in the
    router and its KV meanwhile. A client is cut only if it reads less than the distance between
    the marks of the transport's buffer (48 KiB) in that time.
    """

    unread_timeout_s = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unread: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_unread()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Make the application's next ``send`` wait."""
        super().pause_writing()
        # Not close(): that would wait until the rest is read.
        self._unread = self.loop.call_later(self.unread_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_unread()
        super().resume_writing()

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


class LimitedHttpProtocol(UnreadTimeoutProtocol):
    """The protocol of one connection. ``head_timeout_s``: set by ``limited_protocol``; ``slot``: by
    ``RouterServer``, None where connections are not counted."""

    head_timeout_s = 30.0
    slot: ConnectionSlot | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.slot is not None:
            self.slot.evict = transport.abort
        self._unparsed = 0  # bytes since the last piece of a body, or the end of a head or request
        self._timer: asyncio.TimerHandle | None = None
        self._wait_for_head()

    def shutdown(self) -> None:
        """The server stops: a client that has not sent its first request gets a moment to do so."""
        cycle: object = self.cycle  # None before the first, whatever its type says
        if cycle is None and not self._ignores_input:
            self.loop.call_later(FIRST_REQUEST_S, super().shutdown)
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.slot is not None:
            self.slot.release()
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            return
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > MAX_HEAD and not self._ignores_input:
            message = f"the headers are too large: more than {MAX_HEAD} bytes without an end"
            self._refuse(ApiError(431, message, code="headers_too_large"))

    def eof_received(self) -> None:
        if self._ignores_input:
            self.transport.close()
        return super().eof_received()

    def send_400_response(self, msg: str) -> None:
        self._refuse(invalid("the request is not valid HTTP/1.1", code="invalid_http"))

    def on_message_begin(self) -> None:
        self._wait_for_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._unparsed = 0
        super().on_headers_complete()
        if self.slot is not None:
            self.slot.mark_busy()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.slot is not None and not self._unfinished:
            self.slot.mark_idle()

    def _wait_for_head(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.head_timeout_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        if not self._unparsed:
            self.transport.close()  # no request has begun
            return
        message = f"the headers were not received within {self.head_timeout_s:g} s"
        self._refuse(ApiError(408, message, code="request_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Respond, unless another response is on its way, and close the connection."""
        if self._ignores_input or self.transport.is_closing():
            return
        self._ignores_input = True
        self._stop_timer()
        if self._unfinished:
            cycle = self._unfinished[-1]
            if len(self._unfinished) > 1 or cycle.response_started or not cycle.more_body:
                self.transport.close()  # which tells the application
                return
            cycle.disconnected = True  # it waits for a body that cannot be parsed
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


def limited_protocol(head_timeout_s: float) -> type[LimitedHttpProtocol]:
    """Return the protocol for uvicorn's ``http`` setting."""
    name = LimitedHttpProtocol.__name__
    return type(name, (LimitedHttpProtocol,), {"head_timeout_s": head_timeout_s})
