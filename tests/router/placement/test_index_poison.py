"""What one worker's keys hold, however large or slow, costs the index no other worker."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.exceptions import TimeoutError as RedisTimeoutError

from protocol.errors import MalformedEvents
from protocol.kv_events import (
    SNAPSHOT_BYTES,
    SNAPSHOT_HEADER_BYTES,
    decode_entry,
    decode_fields,
    decode_snapshot,
    encode_snapshot,
    parse_id,
    snapshot_key,
)
from router.placement.event_cursor import EventCursor
from router.placement.index_reader import IndexReader
from router.placement.prefix_index import PrefixIndex

CLUSTER, BAD, GOOD = "test", "0" * 32, "1" * 32
KEYS = [bytes([i]) * 16 for i in range(4)]


class FakeRedis:
    """Two strings, of which the one of BAD is ``size`` bytes long, or takes too long to read."""

    def __init__(self, size: int = 0, *, slow: bool = False) -> None:
        self.size, self.slow = size, slow
        self.read: list[str] = []  # keys that were read in full
        self.tailed = 0  # reads of streams
        self._commands: list[tuple[str, str]] = []

    def pipeline(self, transaction: bool) -> FakeRedis:
        return self

    async def __aenter__(self) -> FakeRedis:
        self._commands = []
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def strlen(self, key: str) -> None:
        self._commands.append(("strlen", key))

    def getrange(self, key: str, first: int, last: int) -> Any:
        if last < SNAPSHOT_HEADER_BYTES:
            return self._commands.append(("head", key))
        self.read.append(key)
        return self._read(key)

    async def _read(self, key: str) -> bytes:
        if self.slow and key == snapshot_key(CLUSTER, BAD):
            raise RedisTimeoutError("the value is large")
        return self._value(key)

    def _value(self, key: str) -> bytes:
        instance = key.rpartition(":")[2]
        return encode_snapshot(instance, 1, KEYS)

    async def execute(self) -> list[object]:
        replies: list[object] = []
        for name, key in self._commands:
            poisoned = self.size and key == snapshot_key(CLUSTER, BAD)
            value = b"\xff" * SNAPSHOT_HEADER_BYTES if poisoned else self._value(key)
            size = self.size if poisoned else len(value)
            replies.append(size if name == "strlen" else value[:SNAPSHOT_HEADER_BYTES])
        return replies

    async def xread(self, *_: object, **__: object) -> list[object]:
        self.tailed += 1
        await asyncio.sleep(0.001)
        return []


async def run(redis: FakeRedis) -> dict[str, int]:
    """Let a reader of both workers work for some rounds; return what it knows."""
    index = PrefixIndex()
    reader = IndexReader(redis, CLUSTER, index)  # type: ignore[arg-type]
    reader.follow([BAD, GOOD])
    reader.start()
    for _ in range(50):
        await asyncio.sleep(0.01)
        if index.match(KEYS).get(GOOD):
            break
    await reader.close()
    return index.match(KEYS)


async def test_a_snapshot_that_takes_too_long_delays_no_other() -> None:
    """It was read first in every round, and every round failed."""
    redis = FakeRedis(slow=True)
    assert await run(redis) == {GOOD: 4}
    assert redis.tailed, "nor are events of others left unread"


@pytest.mark.parametrize("size", [100 << 20, 1 << 20])
async def test_a_large_value_that_is_no_snapshot_is_not_read(size: int) -> None:
    redis = FakeRedis(size)
    assert await run(redis) == {GOOD: 4}
    assert snapshot_key(CLUSTER, BAD) not in redis.read
    assert 1 << 20 < SNAPSHOT_BYTES < 100 << 20


@given(st.binary(max_size=120), st.binary(max_size=30))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_events_or_malformed(data: bytes, entry_id: bytes) -> None:
    index = PrefixIndex()
    for read in (
        lambda: decode_entry(data),
        lambda: decode_entry(b"\x01" + data),
        lambda: decode_fields({b"e": data}),
        lambda: decode_snapshot(GOOD, b"batonkv1" + data),
        lambda: parse_id(entry_id),
        lambda: list(EventCursor(index, GOOD).apply_entry(entry_id, {b"e": b"\x01" + data})),
        lambda: list(EventCursor(index, GOOD).apply_snapshot(data)),
    ):
        with contextlib.suppress(MalformedEvents):
            read()
