"""Keeps the index up to date: one task reads the events of all workers from Redis.

    round:  snapshots of those that want one  ->  one XREAD for all others  ->  sweep

What is in Redis is a hint and may be garbage: then that worker's entries go, and it is tried again
later. When Redis does not answer, the index stays as it is, only staler.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Iterator
from typing import Any, cast

import redis.asyncio as redis
from redis.exceptions import RedisError, ResponseError

from protocol.errors import MalformedEvents
from protocol.kv_events import (
    ENTRY_KEYS,
    SNAPSHOT_BYTES,
    Kind,
    decode_fields,
    decode_snapshot,
    parse_id,
    portions,
    snapshot_key,
    split_keys,
    stream_key,
)
from router.placement.prefix_index import PrefixIndex

# MERGED router.cursor
# How far one worker's events were read, and what they do to the index. Knows no Redis.
#
#     wanting --snapshot, newer than what was read--> tailing --number missing--> wanting
#        ^                                               |
#        +------------ garbage: nothing is held ---------+
#
# While a number is missing the index keeps what it has: a hint is better than none.


class Cursor:
    """One worker instance. ``seq``: number of the last change that is in the index.

    ``entry`` and ``snapshot`` work while they are iterated over, and yield after each portion how
    many keys it had, so that others can run in between. Both raise MalformedEvents before they
    change anything; the caller then calls ``drop``."""

    def __init__(self, index: PrefixIndex, instance: str) -> None:
        self.instance = instance
        self.seq = 0
        self.wanting = True
        self._index = index

    def entry(self, entry_id: bytes, fields: object) -> Iterator[int]:
        """An entry of the stream. What was read before is passed over."""
        seq = parse_id(entry_id)
        if self.wanting or seq <= self.seq:
            return
        if seq != self.seq + 1:
            self.wanting = True
            return
        for kind, packed in decode_fields(fields):
            keys = split_keys(packed)
            if kind is Kind.STORED:
                self._index.store(self.instance, keys)
            elif kind is Kind.EVICTED:
                self._index.evict(self.instance, keys)
            else:
                self._index.clear(self.instance)
            yield len(keys)
        self.seq = seq

    def snapshot(self, data: bytes) -> Iterator[int]:
        """The snapshot as it is in Redis. One that is not newer changes nothing: still wanting."""
        snapshot = decode_snapshot(self.instance, data)
        if snapshot.seq <= self.seq:
            return
        self._index.clear(self.instance)
        for keys in portions(snapshot.packed, ENTRY_KEYS):
            self._index.store(self.instance, keys)
            yield len(keys)
        self.seq = snapshot.seq
        self.wanting = False

    def drop(self) -> None:
        """What came is garbage: hold nothing, start again from any snapshot."""
        self._index.clear(self.instance)
        self.seq = 0
        self.wanting = True


log = logging.getLogger(__name__)

BLOCK_MS = 250  # an XREAD waits so long for something new
DEADLINE_S = 3.0  # of every exchange with Redis
ENTRIES = 8  # of each stream in one XREAD
PORTION = 4096  # keys put into the index before others may run
SWEEP = 8_000  # entries looked at before others may run
MAX_PAUSE_S = 2.0

_Reply = list[tuple[bytes, list[tuple[bytes, object]]]]  # of XREAD: stream, (id, fields)


class _Tail:
    """One worker that is followed."""

    def __init__(self, index: PrefixIndex, cluster: str, instance: str) -> None:
        self.cursor = Cursor(index, instance)
        self.stream = stream_key(cluster, instance)
        self.snapshot = snapshot_key(cluster, instance)
        self.fresh = time.monotonic()  # when its stream was last read to the end
        self.retry_at = 0.0
        self._failures = 0

    def applied(self) -> None:
        if not self.cursor.wanting:
            self._failures = 0

    def later(self) -> None:
        """Not now: wait longer each time."""
        self._failures += 1
        self.retry_at = time.monotonic() + _pause(self._failures)

    def garbage(self, error: Exception) -> None:
        if not self._failures:
            log.warning("events of worker %s are unreadable: %s", self.cursor.instance[:8], error)
        self.cursor.drop()
        self.later()


class Follower:
    """start -> follow(instances), whenever they change -> close."""

    def __init__(self, client: redis.Redis, cluster: str, index: PrefixIndex) -> None:
        self._redis = client
        self._cluster = cluster
        self._index = index
        self._tails: dict[str, _Tail] = {}
        self._changed = asyncio.Event()
        self._portion = 0
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def follow(self, instances: Collection[str]) -> None:
        """Follow exactly these. The blocks of one that left match no more when this returns."""
        for instance in self._tails.keys() - set(instances):
            del self._tails[instance]
            self._index.remove(instance)
        for instance in instances:
            if instance not in self._tails:
                self._tails[instance] = _Tail(self._index, self._cluster, instance)
        self._changed.set()

    @property
    def staleness_s(self) -> float:
        """Age of what is known of the worker of which the oldest is known; about 0 when well."""
        now = time.monotonic()
        return max((now - tail.fresh for tail in self._tails.values()), default=0.0)

    def start(self) -> None:
        self._closing = False
        self._task = asyncio.create_task(self._run(), name="cache index")

    async def close(self) -> None:
        """Idempotent. The index stays as it is."""
        self._closing = True  # a client library may swallow a cancellation
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    # ---- the task ---------------------------------------------------------------------------

    async def _run(self) -> None:
        failures = 0
        while not self._closing:
            try:
                await self._round()
                if failures:
                    log.info("cache events can be read again")
                failures = 0
            except Exception as error:  # whatever one round brings, the next may be good
                if not failures:
                    known = isinstance(error, (RedisError, OSError, TimeoutError))
                    log.warning("cache events cannot be read: %r", error, exc_info=not known)
                failures += 1
                await asyncio.sleep(_pause(failures))
            while self._index.sweep(SWEEP):
                await asyncio.sleep(0)

    async def _round(self) -> None:
        self._changed.clear()
        now = time.monotonic()
        for tail in list(self._tails.values()):
            if tail.cursor.wanting and now >= tail.retry_at:
                await self._load(tail)
        tails = [tail for tail in self._tails.values() if not tail.cursor.wanting]
        if tails:
            await self._read(tails)
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BLOCK_MS / 1000):
                    await self._changed.wait()

    async def _load(self, tail: _Tail) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                data = await self._redis.getrange(tail.snapshot, 0, SNAPSHOT_BYTES)
            assert isinstance(data, bytes)
            if data:
                await self._apply(tail, tail.cursor.snapshot(data))
        except MalformedEvents as error:
            tail.garbage(error)
        except ResponseError as error:
            if not _wrong_type(error):
                raise
            tail.garbage(error)
        else:
            if tail.cursor.wanting:
                tail.later()  # its worker will bring a newer one

    async def _read(self, tails: list[_Tail]) -> None:
        streams = {tail.stream.encode(): tail for tail in tails}
        after: dict[Any, Any] = {tail.stream: f"{tail.cursor.seq}-0" for tail in tails}
        began = time.monotonic()
        try:
            async with asyncio.timeout(DEADLINE_S):
                reply = await self._redis.xread(after, count=ENTRIES, block=BLOCK_MS)
        except ResponseError as error:
            if not _wrong_type(error):
                raise
            await self._find_wrong_type(tails)
            return
        full = set()
        for stream, entries in cast("_Reply", reply):
            tail = streams[stream]
            if len(entries) == ENTRIES:
                full.add(stream)
            for entry_id, fields in entries:
                try:
                    await self._apply(tail, tail.cursor.entry(entry_id, fields))
                    tail.applied()
                except MalformedEvents as error:
                    tail.garbage(error)
        for stream, tail in streams.items():
            if stream not in full and not tail.cursor.wanting:
                tail.fresh = began

    async def _find_wrong_type(self, tails: list[_Tail]) -> None:
        """One of these keys is no stream; the whole XREAD fails for it."""
        async with asyncio.timeout(DEADLINE_S), self._redis.pipeline(transaction=False) as pipe:
            for tail in tails:
                pipe.type(tail.stream)
            types = await pipe.execute()
        for tail, kind in zip(tails, types, strict=True):
            if kind not in (b"stream", b"none"):
                tail.garbage(MalformedEvents(f"{tail.stream} is a {kind!r}, not a stream"))

    async def _apply(self, tail: _Tail, steps: Iterator[int]) -> None:
        """In portions, others running in between. Ends when the worker has left meanwhile."""
        while self._tails.get(tail.cursor.instance) is tail:
            keys = next(steps, None)
            if keys is None:
                return
            self._portion += keys
            if self._portion >= PORTION:
                self._portion = 0
                await asyncio.sleep(0)


def _pause(failures: int) -> float:
    return float(min(0.1 * 2 ** min(failures, 8), MAX_PAUSE_S))


def _wrong_type(error: ResponseError) -> bool:
    return "WRONGTYPE" in str(error)
