"""Who else may reach the Redis of a cluster."""

from __future__ import annotations

import logging
from typing import Any

import redis

from protocol.errors import StartupError
from protocol.security.cluster_token import is_loopback

log = logging.getLogger("baton.redis")


def check_exposure(url: str) -> None:
    """Raises StartupError for a Redis beyond this machine that asks nobody for anything, and warns
    of one that is spoken to in the clear. ``url`` has been through ``check_url``.

    Whoever writes there decides which workers routers know of, and can stop the service."""
    pool = redis.ConnectionPool.from_url(url)
    options: dict[str, Any] = pool.connection_kwargs
    host = options.get("host", "localhost")
    if "path" in options or is_loopback(host):
        return
    encrypted = issubclass(pool.connection_class, redis.SSLConnection)
    if not (options.get("password") or (encrypted and options.get("ssl_certfile"))):
        raise StartupError(
            f"refusing the Redis at {host!r}: beyond this machine it must ask for a password or,"
            " with rediss://, for a client's certificate (?ssl_certfile= and ssl_keyfile=);"
            " otherwise anybody on the network could write into it"
        )
    if not encrypted:
        log.warning(
            "the Redis at %r is spoken to in the clear, its password with it: use rediss://", host
        )
