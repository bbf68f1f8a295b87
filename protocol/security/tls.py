"""Mutual TLS between Baton's processes: the files, and what they hold now.

    files --checked--> Identity --each connection--> unchanged: the same certificate
                                                 +-> renewed:   read again, and used from now on
                                                 +-> unusable:  a warning; the last good one stays

A certificate is good for both ends of a connection, is issued by the cluster's CA, and names the
host that its worker listens on, by DNS name or IP address, in its subject alternative names. A
client believes a server that proves the name it was dialled by (RFC 9525) or, where the cluster has
a name of its own, that one: nodes whose addresses nobody knows beforehand can share a certificate.
A server believes every client whom the CA vouches for, and asks for the cluster token besides.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from protocol.errors import StartupError
from protocol.security.certificates import Pems, check, check_names, not_after, warning_of

log = logging.getLogger("baton.tls")

LOOK_S = 1.0
"""How often at most the files are looked at."""

_WARN_EVERY_S = 86_400.0

Stamp = tuple[tuple[int, int, int], ...]


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Mutual TLS between Baton's processes: paths of PEM files, and who is believed."""

    ca: str  # certificate of the cluster's CA: who may connect, and who is connected to
    cert: str  # this node's certificate, for both ends of a connection
    key: str  # its private key; not readable by everybody
    name: str | None = None  # DNS name that every server proves; None: the address it is dialled by


class HttpTls(msgspec.Struct, frozen=True, kw_only=True):
    """TLS of the router's HTTP server: paths of PEM files."""

    cert: str  # with the chain up to, but without, the root
    key: str


class Identity:
    """What this process proves itself with. Raises StartupError for files that cannot be used.

    Thread-safe: gRPC asks from threads of its own."""

    def __init__(
        self,
        files: TlsFiles,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._files, self._clock, self._now = files, clock, now
        self._lock = threading.Lock()
        self._stamp = _stamp(files)
        self._pems = read(files, now())
        self._version = 0
        self._looked = clock()
        self._warned = -_WARN_EVERY_S
        self._warn()

    @property
    def version(self) -> int:
        """Counts renewals."""
        return self.current()[0]

    def current(self) -> tuple[int, Pems]:
        """The version, and what it holds; reads the files again when they have changed."""
        with self._lock:
            if self._clock() - self._looked >= LOOK_S:
                self._looked = self._clock()
                self._look()
                self._warn()
            return self._version, self._pems

    def _look(self) -> None:
        stamp = _stamp(self._files)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._pems = read(self._files, self._now())
        except StartupError as error:  # one file of two has been replaced, perhaps
            log.warning("the TLS files that came are not used, the last ones are: %s", error)
            return
        self._version += 1
        log.info("the TLS files have changed, and are used from now on")

    def _warn(self) -> None:
        text = warning_of(self._pems, self._now())
        if text and self._clock() - self._warned >= _WARN_EVERY_S:
            self._warned = self._clock()
            log.warning("%s: %s", self._files.cert, text)


def read(files: TlsFiles, now: float) -> Pems:
    """The content of the files, checked (``now``: seconds since the epoch). Raises StartupError."""
    ca, cert = read_file(files.ca, "tls.ca"), read_file(files.cert, "tls.cert")
    pems = Pems(ca, cert, read_key(files.key, "tls.key"))
    check(pems, now, {"ca": files.ca, "cert": files.cert, "key": files.key})
    return pems


def check_files(files: TlsFiles, host: str) -> None:
    """Raises StartupError for files that what listens on ``host`` cannot use."""
    check_names(read(files, time.time()).cert, host, files.name)


def read_file(path: str, name: str) -> bytes:
    """Raises StartupError; ``name`` is the setting."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StartupError(f"{name}: cannot read {path}: {error.strerror}") from None


def read_key(path: str, name: str) -> bytes:
    """A private key. Raises StartupError also when everybody on the machine could read it."""
    content = read_file(path, name)
    check_private(path, name)
    return content


def check_private(path: str, name: str) -> None:
    """Raises StartupError for a file of secrets that other users may read."""
    mode = Path(path).stat().st_mode & 0o777
    if mode & 0o007:
        raise StartupError(
            f"{name}: every user of this machine has access to {path} (mode {mode:04o}); it holds"
            f" secrets: chmod 600 it"
        )


def http_context(files: HttpTls) -> ssl.SSLContext:
    """For an HTTPS server. Raises StartupError."""
    read_file(files.cert, "http_tls.cert")
    read_key(files.key, "http_tls.key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load(context, files.cert, files.key, "http_tls")
    return context


def http_not_after(files: HttpTls) -> float | None:
    """When the certificate in the file ends, seconds since the epoch; None: it cannot be read."""
    try:
        return not_after(read_file(files.cert, "http_tls.cert"))
    except (StartupError, ValueError):
        return None


def renew(context: ssl.SSLContext, files: HttpTls) -> None:
    """Read the files again, for connections to come; the last ones stay where these are no use."""
    try:
        # Apart first: a pair that does not match would leave ``context`` without a key.
        for each in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
            load(each, files.cert, files.key, "http_tls")
    except StartupError as error:
        log.warning("%s", error)


def mutual_context(files: TlsFiles) -> ssl.SSLContext:
    """For a server whose clients must show a certificate of the cluster. Raises StartupError."""
    pems = read(files, time.time())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load(context, files.cert, files.key, "tls")
    context.load_verify_locations(cadata=pems.ca.decode("ascii", "ignore"))  # less comments
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """For HTTPS to the cluster's processes; public CAs are believed, too, as a router's certificate
    for clients may be of one. ``files.name`` is for the caller to ask for, as ``server_hostname``.

    Raises StartupError."""
    pems = read(files, time.time())
    context = ssl.create_default_context()
    context.load_verify_locations(cadata=pems.ca.decode("ascii", "ignore"))
    load(context, files.cert, files.key, "tls")
    return context


def load(context: ssl.SSLContext, cert: str, key: str, name: str) -> None:
    """Use this certificate from the next handshake on. Raises StartupError."""
    try:
        context.load_cert_chain(cert, key, password="")  # an encrypted key fails, and asks nobody
    except (ssl.SSLError, OSError, ValueError):
        raise StartupError(
            f"{name}: {cert} and {key} cannot be used: expected a PEM certificate (with its chain)"
            " and the unencrypted private key that belongs to it"
        ) from None


def _stamp(files: TlsFiles) -> Stamp:
    """Changes when a file does; a file that is missing for a moment has one of its own."""
    return tuple(_file_stamp(path) for path in (files.ca, files.cert, files.key))


def _file_stamp(path: str) -> tuple[int, int, int]:
    try:
        found = Path(path).stat()
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_size, found.st_ino
