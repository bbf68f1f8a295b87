"""Decides on which hosts workers and routers may listen: beyond this machine they need TLS.

Settings check this before a process starts, and servers again before they listen.
"""

from __future__ import annotations

import ipaddress

from protocol.errors import StartupError


def is_loopback(host: str) -> bool:
    """Return whether a server on ``host`` can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_worker_host(host: str, *, tls: bool = False) -> None:
    """Raise StartupError for a host on which a worker may not listen. Workers always require the
    cluster token; beyond loopback they must have TLS as well."""
    if is_loopback(host):
        return
    if not tls:
        raise StartupError(
            f"refusing to listen on {host!r}: beyond loopback workers need TLS. Missing: the files"
            " ca, cert and key (`baton certs init DIR --host NAME` makes them). Without them:"
            " 127.0.0.1, ::1 or localhost"
        )
    if not host or _is_wildcard(host):
        raise StartupError(
            f"a worker cannot listen on {host!r}: its host must be the name or address at which"
            " the others reach it"
        )


def check_router_host(host: str, *, api_keys: bool, tls: bool, allow_plain_http: bool) -> None:
    """Raise StartupError for a host on which a router may not listen; it says what is missing."""
    if is_loopback(host):
        return
    missing = []
    if not api_keys:
        missing.append("a file of API keys (--api-keys; `baton keys new TENANT` makes a key)")
    if not (tls or allow_plain_http):
        missing.append(
            "a certificate for HTTPS (http_tls: cert and key), or allow_plain_http where a proxy"
            " in front speaks TLS"
        )
    if missing:
        raise StartupError(
            f"refusing to listen on {host!r}: beyond loopback a router needs API keys and TLS."
            f" Missing: {'; '.join(missing)}. Without them: 127.0.0.1, ::1 or localhost"
        )


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
