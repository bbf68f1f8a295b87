"""How long either end of a connection waits for the other's sign of life."""

from __future__ import annotations

from protocol.endpoints.grpc_endpoints import channel_options, server_options
from protocol.liveness import SILENCE_S


def test_a_caller_that_stands_still_for_some_seconds_keeps_its_streams() -> None:
    """A server closed the connection of a router after 5 s, and the router took the worker for
    dead. A dead server is noticed as early as before."""
    server, channel = dict(server_options()), dict(channel_options())
    for name in ("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"):
        assert int(server[name]) >= 10_000
        assert int(channel[name]) <= 1000 * SILENCE_S
