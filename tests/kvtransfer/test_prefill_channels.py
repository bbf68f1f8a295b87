"""Channels are kept while they are used, and closed when they have been idle."""

from __future__ import annotations

from protocol.endpoints.grpc_endpoints import IDLE_S, ChannelCache


def test_each_endpoint_has_one_channel_until_it_is_idle() -> None:
    now = 0.0
    closed: list[str] = []
    channels = ChannelCache(lambda endpoint: [endpoint], lambda c: closed.append(c[0]), lambda: now)
    first = channels.get("a:1")
    now = IDLE_S / 2
    channels.get("b:1")
    assert channels.get("a:1") is first
    now = IDLE_S / 2 + IDLE_S + 1
    fresh = channels.get("c:1")
    assert closed == ["b:1", "a:1"]
    assert channels.get("a:1") is not first
    assert channels.drain()[0] is fresh and channels.drain() == []
