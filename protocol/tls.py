"""The files that TLS works with."""

from __future__ import annotations

import msgspec


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Mutual TLS between Baton's processes: paths of PEM files."""

    ca: str  # certificate of the cluster's CA: who may connect, and who is connected to
    cert: str  # this node's certificate, for both ends of a connection
    key: str  # its private key; not readable by everybody


class HttpTls(msgspec.Struct, frozen=True, kw_only=True):
    """TLS of the router's HTTP server: paths of PEM files."""

    cert: str  # with the chain up to, but without, the root
    key: str
