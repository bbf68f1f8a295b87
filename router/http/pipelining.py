"""Requests that a client sends on one connection before the first is answered (RFC 9112, 9.3.2).

They are answered one after another, as HTTP/1.1 asks. Uvicorn alone tells only the newest of them
that the client has gone, and stops reading while one waits, so that it does not see the client go.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import islice

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_PIPELINED = 32
"""Unfinished requests of one connection. What a client sends beyond is ignored, and the connection
closes after those before it: the client sends the rest again on another one."""

MAX_PIPELINED_BYTES = 1 << 20
"""Bytes of bodies that wait for an earlier request of their connection to end."""


class PipelineFull(Exception):
    """Ends the parsing of a connection whose further requests are ignored."""


class PipeliningProtocol(HttpToolsProtocol):
    """Uvicorn's protocol with a bounded pipeline, all of whose requests end with the connection.

    unfinished: [running, waiting, waiting, ...]  --response complete--> the next one runs
                 all --connection lost--> running: disconnected; waiting: dropped

    Reading never stops because requests wait: only a connection that is read shows its end.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unfinished: deque[RequestResponseCycle] = deque()
        self._ignores_input = False  # an error was sent, or the pipeline is full

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._unfinished:
            cycle.disconnected = True
            cycle.message_event.set()
        self._unfinished.clear()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse as uvicorn does, without a line in the log for what is no HTTP or asks for another
        protocol: clients could fill the disk with such lines."""
        if self._ignores_input:
            return
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("the request is not valid HTTP/1.1")
        except httptools.HttpParserUpgrade:
            pass  # the request itself is answered, over HTTP/1.1

    def send_400_response(self, msg: str) -> None:
        if not self._ignores_input:  # else PipelineFull has ended the parsing
            super().send_400_response(msg)

    def on_headers_complete(self) -> None:
        if len(self._unfinished) >= MAX_PIPELINED:
            self._end_pipeline()
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self._unfinished.append(self.cycle)
        if len(self._unfinished) > 1:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        if len(self._unfinished) < 2:
            super().on_body(body)
            return
        # Uvicorn would stop reading here, until the body is read: when the request runs.
        self.cycle.body += body
        waiting = sum(len(cycle.body) for cycle in islice(self._unfinished, 1, None))
        if waiting > MAX_PIPELINED_BYTES:
            self._unfinished.pop()
            self.pipeline.popleft()
            self.cycle = self._unfinished[-1]
            self._end_pipeline()

    def on_response_complete(self) -> None:
        if self._unfinished:
            self._unfinished.popleft()
        super().on_response_complete()

    def _end_pipeline(self) -> None:
        """Ignore what follows the last unfinished request. Raises PipelineFull for the parser."""
        self._ignores_input = True
        self._unfinished[-1].keep_alive = False
        raise PipelineFull
