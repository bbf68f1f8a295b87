"""The sending end of the carrier ``tcp``: a port, and threads that send slots as they are filled.

    accepted --greeted--> idle --pull--> bound to a transfer --last frame--> idle --> ...
                                           |        ^
                        a frame was put    v        |  no frame waits
                                         sending (a thread)

A connection holds a thread only from its first byte until it is greeted, and while its frames are
sent. Everything else happens on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvtransfer.carrier import ACCEPT_PAUSE_S, CONNECT_S, FRAME_SEND_S
from kvtransfer.carriers.tcp_connection import (
    END,
    OKAY,
    UNKNOWN,
    ConnectionBroken,
    TcpConnection,
    TcpSecurity,
    tune,
)
from kvtransfer.outbound import OutboundFrames, TransferTable
from protocol.errors import StartupError

log = logging.getLogger("baton.kv")

MAX_OPEN = 1024
"""Connections of receivers, idle ones included; further ones are closed at once."""

_SENDING_THREADS = 32
_GREETING_THREADS = 8
_LINGER_S = 0.02
"""How long a thread waits for the next frame before it lets go of a connection."""


class TcpSender:
    """Serves the open outbound transfers of a worker over TCP. ``TcpCarrier`` has one."""

    def __init__(self, token: bytes, security: TcpSecurity) -> None:
        self._token = token
        self._security = security
        self.transfers = TransferTable()
        self._bound: dict[OutboundFrames, set[TcpConnection]] = {}
        self._busy: set[TcpConnection] = set()  # in the hands of a thread
        self._open: set[TcpConnection] = set()
        self._greeting = ThreadPoolExecutor(_GREETING_THREADS, thread_name_prefix="kv-tcp-greet")
        self._threads = ThreadPoolExecutor(_SENDING_THREADS, thread_name_prefix="kv-tcp-send")
        self._listener: socket.socket | None = None
        self._pending = 0  # connections that are not greeted yet
        self._silent: set[socket.socket] = set()  # of these, without a byte yet

    # ---- life -------------------------------------------------------------------------------

    def start(self, host: str, port: int) -> int:
        """Listen, and return the port. Raises StartupError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=256)
        except OSError as error:
            raise StartupError(f"cannot listen for KV on {host}, port {port}: {error}") from error
        self._listener.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._listen()
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        if self._listener is None:
            return
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        self._listener = None
        for connection in list(self._open):
            self._drop(connection)
        for sock in list(self._silent):
            self._drop_silent(sock)
        self._greeting.shutdown(wait=False, cancel_futures=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- connections ------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        while self._listener is not None:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:  # none is left
                return
            except ConnectionError:  # it is gone already
                continue
            except OSError as error:
                log.warning("KV connections wait %g s: %s", ACCEPT_PAUSE_S, error)
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(ACCEPT_PAUSE_S, self._listen)
                return
            if len(self._open) + self._pending >= MAX_OPEN:
                log.warning("a receiver of KV is refused: %d connections are open", MAX_OPEN)
                sock.close()
                continue
            self._pending += 1
            self._silent.add(sock)
            self._loop.add_reader(sock.fileno(), self._hear, sock)
            self._loop.call_later(CONNECT_S, self._drop_silent, sock)

    def _hear(self, sock: socket.socket) -> None:
        """Greet a receiver that has begun to speak; a silent connection takes no thread."""
        self._silent.discard(sock)
        self._loop.remove_reader(sock.fileno())
        self._run(self._greeting, self._greet, sock, then=self._greeted)

    def _drop_silent(self, sock: socket.socket) -> None:
        if sock in self._silent:
            self._silent.discard(sock)
            self._loop.remove_reader(sock.fileno())
            sock.close()
            self._pending -= 1

    def _greet(self, sock: socket.socket) -> TcpConnection:
        """Let a receiver prove that it belongs to the cluster; a thread runs it."""
        try:
            tune(sock)
            sock.settimeout(CONNECT_S)
            sock = self._security.wrap_server(sock)
            connection = TcpConnection(sock)
            connection.check_greeting(self._token, CONNECT_S)
            return connection
        except (OSError, ConnectionBroken, StartupError):
            sock.close()
            raise

    def _greeted(self, connection: TcpConnection | None, error: BaseException | None) -> None:
        self._pending -= 1
        if connection is None:
            log.warning("a connection to the KV port is closed: %s", error)
        else:
            self._open.add(connection)
            self._wait_for_pull(connection)

    def _wait_for_pull(self, connection: TcpConnection) -> None:
        if self._listener is None:
            self._drop(connection)
            return

        def come() -> None:
            self._loop.remove_reader(connection.fileno())
            self._use(connection, self._greeting, self._read_pull, connection, then=pulled)

        def pulled(outbound: OutboundFrames | None, error: BaseException | None) -> None:
            if error is not None or self._listener is None:
                self._drop(connection)  # the other end has closed it, as a rule
            elif outbound is None:
                self._wait_for_pull(connection)
            elif outbound.closed:
                self._drop(connection)
            else:
                self._bound.setdefault(outbound, set()).add(connection)
                self._send_on(connection, outbound)

        self._loop.add_reader(connection.fileno(), come)

    def _read_pull(self, connection: TcpConnection) -> OutboundFrames | None:
        """Take a connection's next pull, and return its transfer; a thread runs it."""
        transfer, number = connection.read_pull(CONNECT_S)
        outbound = self.transfers.claim(transfer, number)
        connection.send([OKAY if outbound is not None else UNKNOWN], CONNECT_S)
        return outbound

    def _drop(self, connection: TcpConnection) -> None:
        """Close a connection. A thread that uses it fails soon, and then it is closed."""
        connection.abort()
        if connection not in self._busy and connection in self._open:
            self._open.discard(connection)
            self._loop.remove_reader(connection.fileno())
            connection.close()

    # ---- transfers --------------------------------------------------------------------------

    def on_frame(self, outbound: OutboundFrames) -> None:
        """A frame was put: an idle connection of its transfer sends it. All of them send the end
        after the last one."""
        for connection in self._bound.get(outbound, ()):
            if connection not in self._busy:
                self._send_on(connection, outbound)
                if not outbound.last_put:
                    return

    def on_close(self, outbound: OutboundFrames) -> None:
        """The transfer has ended; what is bound to it now has not sent its end."""
        for connection in self._bound.pop(outbound, set()):
            self._drop(connection)

    def _send_on(self, connection: TcpConnection, outbound: OutboundFrames) -> None:
        def sent(at_end: bool | None, error: BaseException | None) -> None:
            bound = self._bound.get(outbound, set())
            if at_end is None or connection not in bound or self._listener is None:
                if error is not None and connection in bound:
                    log.warning("a KV connection broke: %s", error)
                bound.discard(connection)
                self._drop(connection)
            elif at_end:
                bound.discard(connection)
                self._wait_for_pull(connection)
            elif outbound.waiting or outbound.last_put:
                self._send_on(connection, outbound)

        self._use(connection, self._threads, _send_frames, connection, outbound, then=sent)

    def _use(
        self,
        connection: TcpConnection,
        threads: ThreadPoolExecutor,
        work: Callable[..., Any],
        *args: Any,
        then: Callable[[Any, BaseException | None], None],
    ) -> None:
        """``_run`` with a connection that stays open meanwhile."""

        def done(result: Any, error: BaseException | None) -> None:
            self._busy.discard(connection)
            then(result, error)

        self._busy.add(connection)
        self._run(threads, work, *args, then=done)

    def _run(
        self,
        threads: ThreadPoolExecutor,
        work: Callable[..., Any],
        *args: Any,
        then: Callable[[Any, BaseException | None], None],
    ) -> None:
        """Run ``work`` on a thread, and ``then`` with its result or its error on the event loop."""

        def done(future: asyncio.Future[Any]) -> None:
            if future.cancelled():
                then(None, None)
            elif (error := future.exception()) is not None:
                then(None, error)
            else:
                then(future.result(), None)

        self._loop.run_in_executor(threads, work, *args).add_done_callback(done)


def _send_frames(connection: TcpConnection, outbound: OutboundFrames) -> bool:
    """Send frames until none waits; return whether the end was sent. A thread runs it.

    Raises ConnectionBroken."""
    while (frame := outbound.take(_LINGER_S)) is not None:
        try:
            connection.send([frame.header, frame.payload], FRAME_SEND_S)
        finally:
            frame.release()
    if not outbound.ended:
        return False
    if outbound.closed:
        raise ConnectionBroken("the transfer was closed")
    connection.send([END], FRAME_SEND_S)
    return True
