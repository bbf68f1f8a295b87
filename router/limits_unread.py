"""An end to answers that nobody reads: uvicorn's protocol, with a bound on how long it may wait.

    writing --64 KiB wait beside what the system holds--> paused --read by then--> writing
                                                            | nothing of it within unread_timeout_s
                                                            +--> cut: the connection is reset

By itself uvicorn waits as long as the client does not hang up, and with it the request's place in
the router and all that was computed for it. To be cut a client must read very slowly: in this time
not what separates the marks of the transport's buffer (48 KiB).
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


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
