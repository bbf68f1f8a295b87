"""Connects to the Redis of a cluster and checks its URL, for every process that uses Redis."""

from __future__ import annotations

import logging
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import RedisError

from protocol.errors import StartupError, UsageError
from protocol.security.listen_hosts import is_loopback

log = logging.getLogger("baton.redis")


def connect(url: str) -> redis.asyncio.Redis:
    """Return a client for ``redis://``, ``rediss://`` or ``unix://`` with a deadline on every
    operation.

    With ``rediss://`` the server must prove its name with a certificate of a CA that this machine
    trusts, or of one in ``?ssl_ca_certs=FILE``."""
    return redis.asyncio.Redis.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0)


def check_url(url: str) -> None:
    """Raise UsageError for a URL that ``connect`` cannot use. The message does not repeat the
    URL, because the wrong part may be a password."""
    try:
        redis.asyncio.ConnectionPool.from_url(url).make_connection()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, RedisError):
        raise UsageError(
            "the Redis URL cannot be used: it must be redis://[[user]:password@]host[:port][/db],"
            " rediss://... for TLS, or unix:///path, with options that redis-py knows; a password"
            " has %2F %3F %23 %40 %25 for / ? # @ %"
        ) from None


def check_exposure(url: str) -> None:
    """Raise StartupError for a Redis beyond this machine that needs neither password nor client
    certificate, and log a warning for one without TLS. ``url`` has passed ``check_url``.

    Write access to Redis decides which workers the routers know, and can stop the service."""
    pool = redis.ConnectionPool.from_url(url)
    options: dict[str, Any] = pool.connection_kwargs
    host = options.get("host", "localhost")
    if "path" in options or is_loopback(host):
        return
    encrypted = issubclass(pool.connection_class, redis.SSLConnection)
    if not (options.get("password") or (encrypted and options.get("ssl_certfile"))):
        raise StartupError(
            f"refusing the Redis at {host!r}: on another machine it must require a password or,"
            " with rediss://, for a client's certificate (?ssl_certfile= and ssl_keyfile=);"
            " otherwise anybody on the network could write to it"
        )
    if not encrypted:
        log.warning(
            "traffic to the Redis at %r, its password included, is not encrypted: use rediss://",
            host,
        )
