"""Mutual TLS between the processes of a cluster: its files, and the contexts made from them.

    files --checked--> TlsIdentity --each connection--> unchanged: the same certificate
                                                    +-> renewed:   read again, used from now on
                                                    +-> unusable:  a warning; the last one stays

A certificate serves both ends of a connection. The cluster's CA issues it, and its subject
alternative names hold the host on which its worker listens, as DNS name or IP address. A client
accepts a server that proves the name by which it was dialled (RFC 9525) or, if the cluster has a
name of its own, that name: nodes with unknown addresses can share such a certificate. A server
accepts every client with a certificate of the CA, and requires the cluster token as well.
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
from protocol.security.certificates import (
    PemBundle,
    check_certificate_host,
    check_certificates,
    expiry_warning,
    not_after,
)

log = logging.getLogger("baton.tls")

CHECK_FILES_S = 1.0
"""Least time between two checks of the files for a renewal."""

_WARN_EVERY_S = 86_400.0

Stamp = tuple[tuple[int, int, int], ...]


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of the PEM files for mutual TLS, and the name that servers must prove."""

    ca: str  # certificate of the cluster's CA, which must have issued that of every peer
    cert: str  # this node's certificate, for both ends of a connection
    key: str  # its private key; not readable by other users
    name: str | None = None  # DNS name that every server proves; None: the host that was dialled


class HttpTls(msgspec.Struct, frozen=True, kw_only=True):
    """TLS of the router's HTTP server: paths of PEM files."""

    cert: str  # with the chain up to, but without, the root
    key: str


class TlsIdentity:
    """The certificate of this process, read again when its files are renewed. Raises StartupError
    for files that cannot be used.

    Thread-safe, because gRPC calls it from its own threads."""

    def __init__(
        self,
        files: TlsFiles,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._files, self._clock, self._now = files, clock, now
        self._lock = threading.Lock()
        self._stamp = _stamp(files)
        self._pems = read_pem_bundle(files, now())
        self._version = 0
        self._checked_at = clock()
        self._warned = -_WARN_EVERY_S
        self._warn()

    @property
    def version(self) -> int:
        """Number of renewals so far."""
        return self.current()[0]

    def current(self) -> tuple[int, PemBundle]:
        """Return version and content; read the files again if they have changed."""
        with self._lock:
            if self._clock() - self._checked_at >= CHECK_FILES_S:
                self._checked_at = self._clock()
                self._reload()
                self._warn()
            return self._version, self._pems

    def _reload(self) -> None:
        stamp = _stamp(self._files)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._pems = read_pem_bundle(self._files, self._now())
        except StartupError as error:  # one file of two has been replaced, perhaps
            log.warning("the changed TLS files are not used; the last ones stay in use: %s", error)
            return
        self._version += 1
        log.info("the TLS files have changed and are in use now")

    def _warn(self) -> None:
        text = expiry_warning(self._pems, self._now())
        if text and self._clock() - self._warned >= _WARN_EVERY_S:
            self._warned = self._clock()
            log.warning("%s: %s", self._files.cert, text)


def read_pem_bundle(files: TlsFiles, now: float) -> PemBundle:
    """Return the checked content of the files; ``now`` is in seconds since the epoch.

    Raises StartupError."""
    ca, cert = read_file(files.ca, "tls.ca"), read_file(files.cert, "tls.cert")
    pems = PemBundle(ca, cert, read_key(files.key, "tls.key"))
    check_certificates(pems, now, {"ca": files.ca, "cert": files.cert, "key": files.key})
    return pems


def check_files(files: TlsFiles, host: str) -> None:
    """Raise StartupError for files that a server on ``host`` cannot use."""
    check_certificate_host(read_pem_bundle(files, time.time()).cert, host, files.name)


def read_file(path: str, name: str) -> bytes:
    """Return the content of a file; ``name`` is its setting. Raises StartupError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StartupError(f"{name}: cannot read {path}: {error.strerror}") from None


def read_key(path: str, name: str) -> bytes:
    """Return a private key. Raises StartupError also when other users may read it."""
    content = read_file(path, name)
    check_private(path, name)
    return content


def check_private(path: str, name: str) -> None:
    """Raise StartupError for a file of secrets that other users may read."""
    mode = Path(path).stat().st_mode & 0o777
    if mode & 0o007:
        raise StartupError(
            f"{name}: every user of this machine has access to {path} (mode {mode:04o}); it holds"
            f" secrets: chmod 600 it"
        )


def https_server_context(files: HttpTls) -> ssl.SSLContext:
    """Return a context for an HTTPS server without client certificates. Raises StartupError."""
    read_file(files.cert, "http_tls.cert")
    read_key(files.key, "http_tls.key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_cert_chain(context, files.cert, files.key, "http_tls")
    return context


def http_not_after(files: HttpTls) -> float | None:
    """Return when the certificate in the file expires, in seconds since the epoch; None if it
    cannot be read."""
    try:
        return not_after(read_file(files.cert, "http_tls.cert"))
    except (StartupError, ValueError):
        return None


def reload_certificate(context: ssl.SSLContext, files: HttpTls) -> None:
    """Read the files again for new connections; keep the old ones if the new ones are unusable."""
    try:
        # In a fresh context first: a pair that does not match would leave ``context`` without key.
        for each in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
            load_cert_chain(each, files.cert, files.key, "http_tls")
    except StartupError as error:
        log.warning("%s", error)


def mutual_tls_server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context for a server whose clients must have a certificate of the cluster. Raises
    StartupError."""
    pems = read_pem_bundle(files, time.time())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_cert_chain(context, files.cert, files.key, "tls")
    context.load_verify_locations(cadata=pems.ca.decode("ascii", "ignore"))  # without comments
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def mutual_tls_client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context for HTTPS to processes of the cluster. It accepts public CAs, too, because
    one may have issued the certificate that a router shows its clients. The caller must pass
    ``files.name`` as ``server_hostname``.

    Raises StartupError."""
    pems = read_pem_bundle(files, time.time())
    context = ssl.create_default_context()
    context.load_verify_locations(cadata=pems.ca.decode("ascii", "ignore"))
    load_cert_chain(context, files.cert, files.key, "tls")
    return context


def load_cert_chain(context: ssl.SSLContext, cert: str, key: str, name: str) -> None:
    """Make ``context`` use this certificate from the next handshake on. Raises StartupError."""
    try:
        context.load_cert_chain(cert, key, password="")  # an encrypted key fails without a prompt
    except (ssl.SSLError, OSError, ValueError):
        raise StartupError(
            f"{name}: {cert} and {key} cannot be used: expected a PEM certificate (with its chain)"
            " and the unencrypted private key that belongs to it"
        ) from None


def _stamp(files: TlsFiles) -> Stamp:
    """Return a value that changes with any of the files, also when one is missing for a moment."""
    return tuple(_file_stamp(path) for path in (files.ca, files.cert, files.key))


def _file_stamp(path: str) -> tuple[int, int, int]:
    try:
        found = Path(path).stat()
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_size, found.st_ino
