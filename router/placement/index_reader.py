"""Keeps the prefix index up to date: one task reads the cache events of all workers from Redis.

    round:  snapshots of the workers that need one  ->  one XREAD for all others  ->  sweep

What is in Redis is a hint and may be garbage: then that worker's entries are dropped, and it is
read again later. While Redis does not answer, the index stays as it is and only gets staler.
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
    SNAPSHOT_BYTES,
    SNAPSHOT_HEADER_BYTES,
    check_snapshot_head,
    snapshot_key,
    stream_key,
)
from router.placement.event_cursor import EventCursor
from router.placement.prefix_index import PrefixIndex

log = logging.getLogger(__name__)

BLOCK_MS = 250  # an XREAD waits this long for a new entry
DEADLINE_S = 3.0  # of every exchange with Redis
ENTRIES = 8  # of each stream in one XREAD
PORTION = 4096  # keys put into the index before other tasks may run
SWEEP = 8_000  # entries swept before other tasks may run
MAX_PAUSE_S = 2.0

_Reply = list[tuple[bytes, list[tuple[bytes, object]]]]  # XREAD's: stream, (id, fields)


class _WorkerEvents:
    """Keys in Redis and read state of one worker."""

    def __init__(self, index: PrefixIndex, cluster: str, instance: str) -> None:
        self.cursor = EventCursor(index, instance)
        self.stream = stream_key(cluster, instance)
        self.snapshot_key = snapshot_key(cluster, instance)
        self.read_at = time.monotonic()  # when its stream was last read to the end
        self.retry_at = 0.0
        self._failures = 0

    def record_success(self) -> None:
        if not self.cursor.needs_snapshot:
            self._failures = 0

    def back_off(self) -> None:
        """Delay the next attempt, longer each time."""
        self._failures += 1
        self.retry_at = time.monotonic() + _pause(self._failures)

    def reset(self, error: Exception) -> None:
        if not self._failures:
            log.warning("events of worker %s are unreadable: %s", self.cursor.instance[:8], error)
        self.cursor.reset()
        self.back_off()


class IndexReader:
    """The reading task of one router: start -> follow(instances), whenever they change -> close."""

    def __init__(self, client: redis.Redis, cluster: str, index: PrefixIndex) -> None:
        self._redis = client
        self._cluster = cluster
        self._index = index
        self._tails: dict[str, _WorkerEvents] = {}
        self._changed = asyncio.Event()
        self._portion = 0
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def follow(self, instances: Collection[str]) -> None:
        """Follow exactly these workers. Blocks of workers that left match no more after this
        call."""
        for instance in self._tails.keys() - set(instances):
            del self._tails[instance]
            self._index.clear(instance)
        for instance in instances:
            if instance not in self._tails:
                self._tails[instance] = _WorkerEvents(self._index, self._cluster, instance)
        self._changed.set()

    @property
    def staleness_s(self) -> float:
        """Return the age of the stalest worker's entries; about 0 in normal operation."""
        now = time.monotonic()
        return max((now - tail.read_at for tail in self._tails.values()), default=0.0)

    def start(self) -> None:
        self._closing = False
        self._task = asyncio.create_task(self._run(), name="cache index")

    async def close(self) -> None:
        """Stop reading; idempotent. The index stays as it is."""
        self._closing = True  # a client library may swallow a cancellation
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        failures = 0
        while not self._closing:
            try:
                await self._round()
                if failures:
                    log.info("cache events can be read again")
                failures = 0
            except Exception as error:  # the next round may work
                if not failures:
                    known = isinstance(error, (RedisError, OSError, TimeoutError))
                    log.warning("cache events cannot be read: %r", error, exc_info=not known)
                failures += 1
                await asyncio.sleep(_pause(failures))
            while self._index.sweep(SWEEP):
                await asyncio.sleep(0)

    async def _round(self) -> None:
        self._changed.clear()
        failure = await self._load_snapshots()
        tails = [tail for tail in self._tails.values() if not tail.cursor.needs_snapshot]
        if tails:
            await self._read(tails)
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BLOCK_MS / 1000):
                    await self._changed.wait()
        if failure is not None:  # Redis may be well, and one snapshot too large for the deadline
            raise failure

    async def _load_snapshots(self) -> Exception | None:
        """Load the snapshots that are due, up to the first failure of Redis, which is returned: the
        events of other workers are read all the same, and other snapshots come first next time."""
        now = time.monotonic()
        for tail in sorted(self._tails.values(), key=lambda tail: tail.retry_at):
            if tail.cursor.needs_snapshot and now >= tail.retry_at:
                try:
                    await self._load(tail)
                except (RedisError, OSError, TimeoutError) as error:
                    tail.back_off()
                    return error
        return None

    async def _load(self, tail: _WorkerEvents) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                data = await self._read_snapshot(tail)
            if data:
                await self._apply(tail, tail.cursor.apply_snapshot(data))
        except MalformedEvents as error:
            tail.reset(error)
        except ResponseError as error:
            if not _wrong_type(error):
                raise
            tail.reset(error)
        else:
            if tail.cursor.needs_snapshot:
                tail.back_off()  # the worker will write a newer one

    async def _read_snapshot(self, tail: _WorkerEvents) -> bytes:
        """Return the snapshot; empty where there is none. Raises MalformedEvents for a value whose
        size or beginning is wrong, which may be large: it is not read."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.strlen(tail.snapshot_key)
            pipe.getrange(tail.snapshot_key, 0, SNAPSHOT_HEADER_BYTES - 1)
            size, head = await pipe.execute()
        if not size:
            return b""
        check_snapshot_head(head, size)
        data = await self._redis.getrange(tail.snapshot_key, 0, SNAPSHOT_BYTES)
        assert isinstance(data, bytes)
        return data

    async def _read(self, tails: list[_WorkerEvents]) -> None:
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
                    await self._apply(tail, tail.cursor.apply_entry(entry_id, fields))
                    tail.record_success()
                except MalformedEvents as error:
                    tail.reset(error)
        for stream, tail in streams.items():
            if stream not in full and not tail.cursor.needs_snapshot:
                tail.read_at = began

    async def _find_wrong_type(self, tails: list[_WorkerEvents]) -> None:
        """Reset the workers whose key is not a stream: one such key makes the whole XREAD fail."""
        async with asyncio.timeout(DEADLINE_S), self._redis.pipeline(transaction=False) as pipe:
            for tail in tails:
                pipe.type(tail.stream)
            types = await pipe.execute()
        for tail, kind in zip(tails, types, strict=True):
            if kind not in (b"stream", b"none"):
                tail.reset(MalformedEvents(f"{tail.stream} is a {kind!r}, not a stream"))

    async def _apply(self, tail: _WorkerEvents, steps: Iterator[int]) -> None:
        """Apply in portions, with other tasks in between; stop if the worker leaves meanwhile."""
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
