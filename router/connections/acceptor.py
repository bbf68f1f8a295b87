"""``Acceptor``: accepts the connections of one listening socket, within a ``ConnectionTable``.

    listening socket --accept--> admitted --> TLS handshake, if any --> HTTP protocol
                                 refused  --> 503 over plain HTTP, then closed

Connections are counted from here on, so that a client that does not finish its TLS handshake counts
as any other. ``RouterServer`` creates one acceptor for each of its listening sockets. An event loop
that accepts by itself does not know how many connections there are, and where descriptors run out,
it closes or postpones those of all clients alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from router.common.errors import ApiError
from router.connections.connection_table import ConnectionSlot, ConnectionTable

log = logging.getLogger(__name__)

ProtocolFactory = Callable[[ConnectionSlot], asyncio.Protocol]

HANDSHAKE_S = 10.0
"""Time limit of a TLS handshake."""

_TLS_CLOSE_S = 5.0  # for the client to confirm the end of a TLS connection
_MOST_WAITING = 4096  # in the kernel's queue
_BATCH = 64  # connections accepted before the event loop turns to others
_PAUSE_S = 0.02  # until a connection that was closed has given its descriptor back
_LINGER_S = 1.0  # to read a refusal: closing at once with unread data would discard it
_MOST_LINGERING = 64
_LOG_EVERY_S = 60.0
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts from one socket: start -> connections -> stop. Its caller closes the socket."""

    def __init__(
        self,
        listener: socket.socket,
        table: ConnectionTable,
        make_protocol: ProtocolFactory,
        context: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._table = table
        self._make_protocol = make_protocol
        self._context = context
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._lingering: deque[socket.socket] = deque()
        self._spare: int | None = None  # a descriptor to accept with where there is no other
        self._resume: asyncio.TimerHandle | None = None
        self._is_stopped = False
        self._logged_at = -_LOG_EVERY_S

    def start(self) -> None:
        self._listener.setblocking(False)
        self._hold_spare()
        self._loop.add_reader(self._listener.fileno(), self._accept_batch)

    def stop(self) -> bool:
        """Accept what waits in the kernel's queue, which closing the socket would reset, and then
        nothing more. Return whether any connection is not with its protocol yet. Idempotent."""
        if not self._is_stopped:
            self._is_stopped = True
            if self._resume is not None:
                self._resume.cancel()
            self._loop.remove_reader(self._listener.fileno())
            for _ in range(_MOST_WAITING):
                if not self._accept():
                    break
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        return bool(self._opening)

    def close(self) -> None:
        """Drop the connections that have not finished their handshake, and refused ones."""
        for task in self._opening:
            task.cancel()
        while self._lingering:
            self._lingering.popleft().close()

    def _accept_batch(self) -> None:
        for _ in range(_BATCH):
            if not self._accept():
                return

    def _accept(self) -> bool:
        """Accept one connection; return whether there may be another one."""
        try:
            client, address = self._listener.accept()
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                return self._accept_without_descriptor(error)
            return error.errno == errno.ECONNABORTED  # that client has gone already
        slot = self._table.admit(address[0])
        if slot is None:
            self._refuse(client)
            return True
        client.setblocking(False)
        slot.evict = partial(_hang_up, client)
        task = self._loop.create_task(self._open(client, slot))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return True

    async def _open(self, client: socket.socket, slot: ConnectionSlot) -> None:
        """Give the connection to its protocol, which releases the slot from then on."""
        tls = self._context
        times = {"ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": _TLS_CLOSE_S}
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make_protocol(slot), client, ssl=tls, **(times if tls else {})
            )
        except OSError:  # the client has gone, or does not speak TLS
            slot.release()
            client.close()
        except asyncio.CancelledError:  # the server ends
            slot.release()
            client.close()
            raise

    def _accept_without_descriptor(self, error: OSError) -> bool:
        """Make room for the client that waits: by an idle connection, else by refusing it.

        The event loop would call again and again otherwise, and use the whole processor.
        """
        self._log(f"no file descriptor is left for a client's connection: {error.strerror}")
        if not self._table.evict_idle() and self._spare is not None:
            os.close(self._spare)
            self._spare = None
            try:
                client, _ = self._listener.accept()
            except OSError:
                pass
            else:
                self._table.refused["descriptors"] += 1
                _send_refusal(client)
                client.close()
            self._hold_spare()
        self._pause()
        return False

    def _pause(self) -> None:
        """Accept nothing for a moment; clients wait in the kernel's queue meanwhile."""
        if self._resume is None and not self._is_stopped:
            self._loop.remove_reader(self._listener.fileno())
            self._resume = self._loop.call_later(_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._resume = None
        if self._spare is None:
            self._hold_spare()
        self._loop.add_reader(self._listener.fileno(), self._accept_batch)

    def _hold_spare(self) -> None:
        try:
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._spare = None

    def _refuse(self, client: socket.socket) -> None:
        limits = self._table.limits
        self._log(
            f"refusing connections: {self._table.open} of {limits.total} connections are open"
        )
        if self._context is not None:  # an answer would need the handshake that is refused
            client.close()
            return
        _send_refusal(client)
        self._lingering.append(client)
        self._loop.call_later(_LINGER_S, client.close)
        while len(self._lingering) > _MOST_LINGERING or self._lingering[0].fileno() < 0:
            self._lingering.popleft().close()

    def _log(self, text: str) -> None:
        if self._clock() - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = self._clock()
            log.warning("%s", text)


def _hang_up(client: socket.socket) -> None:
    """End a connection that the event loop holds: it reads the end, and closes the socket."""
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)


def _send_refusal(client: socket.socket) -> None:
    error = ApiError(
        503,
        "too many connections are open; try again shortly",
        type="service_unavailable",
        code="too_many_connections",
    )
    body = error.body()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
    )
    with contextlib.suppress(OSError):  # raised when the client has gone
        client.setblocking(False)
        client.send(head.encode() + body)
        client.shutdown(socket.SHUT_WR)
