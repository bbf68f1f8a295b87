"""The connections of the carrier ``tcp`` that are kept for further transfers, and the threads of
the receiving end.
"""

from __future__ import annotations

import asyncio
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from kvtransfer.carrier import CONNECT_S
from kvtransfer.carriers.tcp_connection import ConnectionBroken, TcpConnection, TcpSecurity, tune
from protocol.endpoints.grpc_endpoints import host_of
from protocol.errors import CarrierFailed

IDLE_S = 60.0
"""A kept connection that was not used for so long is closed."""

MAX_KEPT = 128
"""Connections that are kept for further transfers."""

_CONNECTING_THREADS = 32
_READING_THREADS = 64


class PoolUser(Protocol):
    """A transfer that uses the pool's threads."""

    async def abort(self) -> None:
        """Close every connection, and wait until no thread uses one."""


class ConnectionPool:
    """Idle connections to senders, by (endpoint, version of the certificate), and the threads of
    the receiving end. ``TcpCarrier`` has one. Event loop only, except ``connect``."""

    def __init__(self, token: bytes, security: TcpSecurity) -> None:
        self._token = token
        self._security = security
        self._idle: dict[tuple[str, int], list[TcpConnection]] = {}
        self.links: set[PoolUser] = set()
        self.connecting = ThreadPoolExecutor(_CONNECTING_THREADS, thread_name_prefix="kv-tcp-dial")
        self.reading = ThreadPoolExecutor(_READING_THREADS, thread_name_prefix="kv-tcp-read")
        self._closed = False

    def check(self, endpoint: str) -> None:
        """Raise CarrierFailed for an endpoint that may not be dialled."""
        if not self._security.permits(endpoint):
            raise CarrierFailed(
                f"{endpoint!r} is not on this machine, and connections to other machines need TLS"
            )

    def take(self, endpoint: str) -> TcpConnection | None:
        """Return an idle connection to this endpoint that looks alive."""
        self._prune()
        kept = self._idle.get((endpoint, self._security.version), [])
        while kept:
            connection = kept.pop()
            if not connection.readable(0):
                return connection
            connection.close()  # the other end has closed it
        return None

    def keep(self, endpoint: str, connection: TcpConnection) -> None:
        """Take back a connection whose transfer has ended."""
        self._prune()
        is_old = connection.version != self._security.version
        if self._closed or is_old or sum(map(len, self._idle.values())) >= MAX_KEPT:
            connection.close()
            return
        connection.idle_since = time.monotonic()
        self._idle.setdefault((endpoint, connection.version), []).append(connection)

    def connect(
        self, endpoint: str, transfer: bytes, number: int, kept: TcpConnection | None
    ) -> TcpConnection:
        """Return a connection that has pulled the transfer; a thread runs it. ``kept`` is used if
        it still works. Raises ConnectionBroken or OSError."""
        if kept is not None:
            try:
                kept.pull(transfer, number, CONNECT_S)
            except ConnectionBroken:
                kept.close()
            else:
                return kept
        host, port = host_of(endpoint), int(endpoint.rpartition(":")[2])
        version = self._security.version
        sock = socket.create_connection((host, port), CONNECT_S)
        try:
            tune(sock)
            sock = self._security.wrap_client(sock, host)
            connection = TcpConnection(sock)
            connection.version = version
            connection.greet(self._token, CONNECT_S)
            connection.pull(transfer, number, CONNECT_S)
        except BaseException:
            sock.close()
            raise
        return connection

    def _prune(self) -> None:
        oldest = time.monotonic() - IDLE_S
        for key, kept in list(self._idle.items()):
            for connection in [c for c in kept if c.idle_since < oldest]:
                kept.remove(connection)
                connection.close()
            if not kept:
                del self._idle[key]

    async def close(self) -> None:
        """Close every connection, and end the threads."""
        self._closed = True
        await asyncio.gather(*(link.abort() for link in list(self.links)))
        for kept in self._idle.values():
            for connection in kept:
                connection.close()
        self._idle.clear()
        self.connecting.shutdown(wait=False, cancel_futures=True)
        self.reading.shutdown(wait=False, cancel_futures=True)
