"""A bare TCP connection on loopback: ``sendall`` of one buffer, ``recv_into`` another."""

from __future__ import annotations

import socket
import ssl
from typing import Any

from bench.kv_link.media.memory import digest, make_buffer

WAIT_S = 30.0


class SocketEnd:
    """The receiver listens; one byte back tells the sender that everything has come."""

    def __init__(self, sending: bool) -> None:
        self._sending = sending
        self._buffer = make_buffer(sending)
        self._listener: socket.socket | None = None
        self._socket: socket.socket | None = None

    def open(self, options: dict[str, Any]) -> int:
        if self._sending:
            return 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(WAIT_S)
        return int(self._listener.getsockname()[1])

    def connect(self, other: int) -> None:
        if self._listener is None:
            connection = socket.create_connection(("127.0.0.1", other), timeout=WAIT_S)
        else:
            connection, _ = self._listener.accept()
            self._listener.close()
        connection.settimeout(WAIT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = self._wrap(connection)

    def _wrap(self, connection: socket.socket) -> socket.socket:
        return connection

    def run(self, job: dict[str, Any]) -> None:
        assert self._socket is not None
        view = self._buffer[: job["bytes"]]
        if self._sending:
            self._socket.sendall(view)
            if self._socket.recv(1) != b"k":
                raise ConnectionError("the receiver has closed the connection")
            return
        came = 0
        while came < len(view):
            count = self._socket.recv_into(view[came:])
            if not count:
                raise ConnectionError("the sender has closed the connection")
            came += count
        self._socket.sendall(b"k")

    def digest(self, job: dict[str, Any]) -> int:
        return digest(self._buffer[: job["bytes"]])

    def close(self) -> None:
        for open_socket in (self._socket, self._listener):
            if open_socket is not None:
                open_socket.close()


class TlsSocketEnd(SocketEnd):
    """The same with mutual TLS 1.3; ``options`` are the paths of ``TlsFiles``."""

    def open(self, options: dict[str, Any]) -> int:
        side = ssl.PROTOCOL_TLS_CLIENT if self._sending else ssl.PROTOCOL_TLS_SERVER
        self._context = ssl.SSLContext(side)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.load_verify_locations(options["ca"])
        self._context.load_cert_chain(options["cert"], options["key"])
        self._context.verify_mode = ssl.CERT_REQUIRED
        return super().open(options)

    def _wrap(self, connection: socket.socket) -> socket.socket:
        if self._sending:
            return self._context.wrap_socket(connection, server_hostname="localhost")
        return self._context.wrap_socket(connection, server_side=True)
