"""One connection of the carrier ``tcp``, its messages, and its security.

    D -> P   hello: "BTK1", u16 length of the token, token            once for a connection
    P -> D   "BTK1"
    D -> P   pull: transfer id (16 bytes), u8 number of the connection, 3 zeros
    P -> D   "OKAY", or "NONE": no such transfer, or this number was used before
    P -> D   frames: header (HEADER_BYTES), payload;  at the end HEADER_BYTES zeros
    D -> P   the next pull ...

With TLS both ends prove a certificate of the cluster first, as on gRPC connections. A connection
whose transfer is cut off is closed; the others are used again.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import ssl
import struct
import threading
import time

from kvtransfer.frames import HEADER_BYTES, TRANSFER_BYTES
from protocol.endpoints.grpc_endpoints import LOOPBACK_ONLY, EndpointSecurity
from protocol.errors import StartupError
from protocol.security.tls import (
    TlsFiles,
    load_cert_chain,
    mutual_tls_server_context,
    read_pem_bundle,
)

HELLO = b"BTK1"
OKAY = b"OKAY"
UNKNOWN = b"NONE"
END = bytes(HEADER_BYTES)
_PULL = struct.Struct(f"<{TRANSFER_BYTES}sB3x")
_LENGTH = struct.Struct("<H")
MAX_TOKEN_BYTES = 4096

IDLE_PROBE_S = 5
"""A connection on which nothing moves is probed so often; its peer may be gone without a word."""


class ConnectionBroken(Exception):
    """The other end has closed the connection, answers too late, or says what makes no sense."""


class TcpConnection:
    """A connected socket with deadlines. One thread uses it at a time; any may ``abort`` it."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN)
        self.idle_since = 0.0
        self.version = 0  # of the certificate that it was opened with
        if not self._tls:
            sock.settimeout(None)  # the kernel waits, see ``_set_limit``: one call for many bytes

    def fileno(self) -> int:
        return self._socket.fileno()

    def abort(self) -> None:
        """Make every call on this connection fail soon, also one that is under way."""
        with contextlib.suppress(OSError):  # not connected any more
            # Not SSLSocket's own method, which would turn TLS off under a thread that reads.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def readable(self, wait_s: float) -> bool:
        """Return whether bytes (or the end) have come, waiting up to ``wait_s``."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        return bool(self._poll.poll(wait_s * 1000))

    def receive(self, view: memoryview, within_s: float) -> None:
        """Fill ``view``. Raises ConnectionBroken, also when the bytes are not there in time."""
        if self.receive_some(view, within_s) < len(view):
            raise ConnectionBroken(f"no answer within {within_s:g} s")

    def receive_some(self, view: memoryview, within_s: float) -> int:
        """Fill ``view`` as far as bytes come in time, and return their number. Raises
        ConnectionBroken."""
        deadline, got = time.monotonic() + within_s, 0
        while got < len(view):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                self._set_limit(left, socket.SO_RCVTIMEO)
                if self._tls:
                    count = self._socket.recv_into(view[got:])
                else:
                    count = self._socket.recv_into(view[got:], 0, socket.MSG_WAITALL)
            except (BlockingIOError, TimeoutError, InterruptedError):
                continue
            except OSError as error:
                raise ConnectionBroken(str(error)) from error
            if not count:
                raise ConnectionBroken("the other end has closed the connection")
            got += count
        return got

    def send(self, parts: list[memoryview | bytes], within_s: float) -> None:
        """Send all bytes. Raises ConnectionBroken, also when none are accepted for ``within_s``."""
        deadline, left = time.monotonic() + within_s, [memoryview(part) for part in parts]
        while left:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise ConnectionBroken(f"nothing was read within {within_s:g} s")
            try:
                self._set_limit(seconds, socket.SO_SNDTIMEO)
                sent = self._socket.send(left[0]) if self._tls else self._socket.sendmsg(left)
            except (BlockingIOError, TimeoutError, InterruptedError):
                continue
            except OSError as error:
                raise ConnectionBroken(str(error)) from error
            deadline = time.monotonic() + within_s
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]

    def _set_limit(self, seconds: float, option: int) -> None:
        """Limit the next call. TLS needs Python's time-outs; without, the kernel's let one call
        move a whole frame."""
        seconds = max(seconds, 0.001)
        if self._tls:
            self._socket.settimeout(seconds)
        else:
            whole = int(seconds)
            limit = struct.pack("@ll", whole, int((seconds - whole) * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)

    # ---- messages ---------------------------------------------------------------------------

    def greet(self, token: bytes, within_s: float) -> None:
        """Prove the cluster's token to the sender. Raises ConnectionBroken."""
        self.send([HELLO + _LENGTH.pack(len(token)) + token], within_s)
        answer = bytearray(len(HELLO))
        self.receive(memoryview(answer), within_s)
        if answer != HELLO:
            raise ConnectionBroken(f"expected {HELLO!r}, {bytes(answer)!r} came")

    def check_greeting(self, token: bytes, within_s: float) -> None:
        """Answer a hello. Raises ConnectionBroken for one without the cluster's token."""
        head = bytearray(len(HELLO) + _LENGTH.size)
        self.receive(memoryview(head), within_s)
        (length,) = _LENGTH.unpack_from(head, len(HELLO))
        if not head.startswith(HELLO) or length > MAX_TOKEN_BYTES:
            raise ConnectionBroken("it is no receiver of KV")
        given = bytearray(length)
        self.receive(memoryview(given), within_s)
        if not hmac.compare_digest(bytes(given), token):
            raise ConnectionBroken("it has a wrong cluster token")
        self.send([HELLO], within_s)

    def pull(self, transfer: bytes, number: int, within_s: float) -> None:
        """Ask for the frames of a transfer. Raises ConnectionBroken if the sender refuses."""
        self.send([_PULL.pack(transfer, number)], within_s)
        answer = bytearray(len(OKAY))
        self.receive(memoryview(answer), within_s)
        if answer != OKAY:
            raise ConnectionBroken("no such transfer, or it is already being received")

    def read_pull(self, within_s: float) -> tuple[bytes, int]:
        """Return the transfer id and the connection's number that a receiver asks for."""
        request = bytearray(_PULL.size)
        self.receive(memoryview(request), within_s)
        transfer, number = _PULL.unpack(request)
        return transfer, number


class TcpSecurity:
    """TLS of the connections, with the certificate files of the gRPC endpoints; or plain text on
    this machine only. Any thread may call it.

    A renewed certificate is used by the connections that are opened after it."""

    def __init__(
        self, endpoints: EndpointSecurity = LOOPBACK_ONLY, files: TlsFiles | None = None
    ) -> None:
        self._endpoints = endpoints
        self._files = files
        self._lock = threading.Lock()
        self._made_for = -1
        self._contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None = None

    @property
    def version(self) -> int:
        """Number of certificate renewals; later connections are new ones."""
        return self._endpoints.version

    @property
    def encrypts(self) -> bool:
        """Whether connections have TLS."""
        return self._files is not None

    def permits(self, endpoint: str) -> bool:
        """Return whether ``endpoint`` (host:port) may be dialled."""
        return self._endpoints.permits(endpoint)

    def wrap_client(self, sock: socket.socket, host: str) -> socket.socket:
        """Return the socket to a sender on ``host``, which has proved its name if there is TLS.
        The socket's time-out limits each step of the handshake. Raises OSError."""
        if self._files is None:
            return sock
        return self._current()[0].wrap_socket(sock, server_hostname=self._files.name or host)

    def wrap_server(self, sock: socket.socket) -> socket.socket:
        """Return the socket to a receiver, which has proved a certificate if there is TLS. Raises
        OSError."""
        return sock if self._files is None else self._current()[1].wrap_socket(sock, True)

    def _current(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """Return the contexts for the client and the server end."""
        version = self._endpoints.version
        with self._lock:
            if self._contexts is None or self._made_for != version:
                assert self._files is not None
                try:
                    self._contexts = (
                        _client_context(self._files),
                        mutual_tls_server_context(self._files),
                    )
                except StartupError:
                    if self._contexts is None:
                        raise  # later, the last ones serve on while the files are replaced
                self._made_for = version
            return self._contexts


def _client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context that accepts servers with a certificate of the cluster's CA alone."""
    pems = read_pem_bundle(files, time.time())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.hostname_checks_common_name = False
    context.load_verify_locations(cadata=pems.ca.decode("ascii", "ignore"))
    load_cert_chain(context, files.cert, files.key, "tls")
    return context


def tune(sock: socket.socket) -> None:
    """Send at once, and notice a peer that is gone without a word."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, IDLE_PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
