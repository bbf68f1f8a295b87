r"""The cache events of a worker: which KV blocks it holds, published in Redis without blocking it.

    stored, evicted, cleared --> pending --every 30 ms, or 4096 keys--> XADD <seq>-0 ...
                            \-> keys    --now and then, or ``lost``---> SET snapshot, XADD mark

    following --Redis failed, or lacks what was written, or the backlog is too long--> lost
    lost      --a snapshot is written; numbers jump, so that readers notice----------> following

While ``lost``, only the set of keys is kept, because the next snapshot contains it. Every second
the log renews both Redis keys and checks that they are as it left them. Routers read them
(``protocol.kv_events`` defines the format).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Sequence
from itertools import islice

import redis.asyncio as redis
from redis.exceptions import RedisError, ResponseError

from protocol.kv_events import (
    ENTRY_KEYS,
    EXPIRE_MS,
    FIELD,
    MARK,
    SNAPSHOT_HEADER_BYTES,
    SNAPSHOT_KEYS,
    CacheChange,
    CacheChangeKind,
    encode_entries,
    encode_snapshot,
    pack_keys,
    snapshot_key,
    stream_key,
)

BACKLOG_KEYS = 16 * ENTRY_KEYS
SNAPSHOT_MIN_CHANGES = 2 * ENTRY_KEYS


class CacheChanges:
    """The keys that a worker has cached, and the changes that Redis has not been told.

    It starts as ``lost``, and becomes so with more than BACKLOG_KEYS pending keys. Then only the
    set of keys is kept, and a snapshot of it must be written."""

    def __init__(self) -> None:
        self.lost = True
        self.pending_keys = 0
        self._pending: list[CacheChange] = []
        self._keys: dict[bytes, None] = {}  # parents before children, as they were stored
        self._since_snapshot = 0  # keys stored or evicted since the last snapshot

    def stored(self, keys: Sequence[bytes]) -> None:
        self._keys.update(dict.fromkeys(keys))
        self._note(CacheChangeKind.STORED, keys)

    def evicted(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._keys.pop(key, None)
        self._note(CacheChangeKind.EVICTED, keys)

    def cleared(self) -> None:
        self._keys.clear()
        self._note(CacheChangeKind.CLEARED, ())

    def _note(self, kind: CacheChangeKind, keys: Sequence[bytes]) -> None:
        if not keys and kind is not CacheChangeKind.CLEARED:
            return
        self._since_snapshot += max(len(keys), 1)
        if self.lost:
            return
        self._pending.append(CacheChange(kind, pack_keys(keys)))
        self.pending_keys += max(len(keys), 1)
        if self.pending_keys > BACKLOG_KEYS:
            self.lose()

    def lose(self) -> None:
        """Drop the pending changes: Redis did not get some, or there are too many."""
        self.lost = True
        self.take()

    def take(self) -> list[CacheChange]:
        """Return the pending changes in order, and clear them."""
        pending, self._pending, self.pending_keys = self._pending, [], 0
        return pending

    def take_snapshot(self) -> Iterable[bytes]:
        """Return all keys for a snapshot that is written now; clears ``lost``."""
        self.lost = False
        self._since_snapshot = 0
        return islice(self._keys, SNAPSHOT_KEYS)

    @property
    def snapshot_outdated(self) -> bool:
        """Whether something changed since the last snapshot."""
        return self._since_snapshot > 0

    @property
    def snapshot_worthwhile(self) -> bool:
        """Whether so much changed since the last snapshot that a new one is worth its size."""
        return self._since_snapshot >= max(SNAPSHOT_MIN_CHANGES, len(self._keys) // 2)


log = logging.getLogger("baton.events")

DEADLINE_S = 3.0  # of every exchange with Redis
STREAM_ENTRIES = 1000  # approximate length that the stream is trimmed to


class CacheEventLog:
    """The log of one worker instance: start -> stored, evicted, cleared -> close.

    ``EngineClient`` calls it from the event loop; the calls only note the change. A snapshot is
    renewed at the age ``changed_s`` if the cache has changed, else at ``snapshot_s``."""

    def __init__(
        self,
        client: redis.Redis,
        cluster: str,
        instance: str,
        *,
        flush_s: float = 0.03,
        renew_s: float = 1.0,
        changed_s: float = 10.0,
        snapshot_s: float = 30.0,
    ) -> None:
        self._redis = client
        self._instance = instance
        self._stream = stream_key(cluster, instance)
        self._snapshot = snapshot_key(cluster, instance)
        self._flush_s = flush_s
        self._renew_s = renew_s
        self._changed_s = changed_s
        self._snapshot_s = snapshot_s
        self._changes = CacheChanges()
        self._seq = 0  # the highest number that Redis may have seen
        self._base = 0  # number of the last snapshot
        self._header = b""  # first bytes of the last snapshot
        self._size = 0  # bytes of the last snapshot
        self._refused = 0  # consecutive writes that Redis refused
        self._wipe = False  # another writer changed the stream: delete it first
        self._renewed = self._published = time.monotonic()
        self._wake = asyncio.Event()
        self._full = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def stored(self, keys: Sequence[bytes]) -> None:
        """Note that these blocks are cached from now on; parents come before children."""
        self._changes.stored(keys)
        self._changed()

    def evicted(self, keys: Sequence[bytes]) -> None:
        """Note that these blocks were evicted."""
        self._changes.evicted(keys)
        self._changed()

    def cleared(self) -> None:
        """Note that the whole cache was cleared."""
        self._changes.cleared()
        self._changed()

    def _changed(self) -> None:
        self._wake.set()
        if self._changes.pending_keys >= ENTRY_KEYS:
            self._full.set()

    def start(self) -> None:
        self._closing = False
        self._task = asyncio.create_task(self._run(), name="cache events")

    async def close(self) -> None:
        """Stop, and delete both keys if Redis answers. Idempotent."""
        self._closing = True  # a client library may swallow a cancellation
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(DEADLINE_S):
                await self._redis.unlink(self._stream, self._snapshot)

    # ---- the task ---------------------------------------------------------------------------

    async def _run(self) -> None:
        failures = 0
        while not self._closing:
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await self._publish()
                if failures:
                    log.warning(
                        "cache events reach Redis again"
                    )  # at the level of the failure's line
                failures = 0
            except Exception as error:  # the next exchange may succeed, whatever failed
                if not failures:
                    known = isinstance(error, (RedisError, OSError, TimeoutError))
                    log.warning("cache events do not reach Redis: %r", error, exc_info=not known)
                failures += 1
                self._refused = self._refused + 1 if isinstance(error, ResponseError) else 0
                self._wipe |= self._refused > 1
                self._changes.lose()
                await asyncio.sleep(min(0.1 * 2 ** min(failures, 8), 2.0))
                continue
            await self._until_due()

    async def _until_due(self) -> None:
        """Wait for a change and then briefly for more, or until the keys must be renewed."""
        await _set_within(self._wake, self._renewed + self._renew_s - time.monotonic())
        if self._wake.is_set():
            await _set_within(self._full, self._flush_s)

    async def _publish(self) -> None:
        """Send the pending changes, or a snapshot."""
        if time.monotonic() >= self._renewed + self._renew_s:
            await self._renew()
        self._wake.clear()
        self._full.clear()
        if self._changes.lost or self._snapshot_due():
            await self._send_snapshot()
        elif pending := self._changes.take():
            await self._send(encode_entries(pending), None)

    def _snapshot_due(self) -> bool:
        age = time.monotonic() - self._published
        return (
            self._changes.snapshot_worthwhile
            or age >= self._snapshot_s
            or (self._changes.snapshot_outdated and age >= self._changed_s)
        )

    async def _send_snapshot(self) -> None:
        entries = [*encode_entries(self._changes.take()), MARK]
        if self._changes.lost and self._seq:
            self._seq += 1  # skip a number, so that readers notice the gap
        seq = self._seq + len(entries)
        snapshot = encode_snapshot(self._instance, seq, self._changes.take_snapshot())
        trim, self._base = self._base, seq
        self._header, self._size = snapshot[:SNAPSHOT_HEADER_BYTES], len(snapshot)
        await self._send(entries, snapshot, trim)
        self._wipe = False
        self._published = time.monotonic()

    async def _send(self, entries: list[bytes], snapshot: bytes | None, trim: int = 0) -> None:
        """Send entries and a snapshot in one exchange; delete entries before number ``trim``."""
        first = self._seq + 1
        self._seq += len(entries)
        async with self._redis.pipeline(transaction=False) as pipe:
            if self._wipe:
                pipe.unlink(self._stream)
            if snapshot is not None:
                pipe.set(self._snapshot, snapshot, px=EXPIRE_MS)
            for seq, entry in enumerate(entries, first):
                pipe.xadd(self._stream, {FIELD: entry}, id=f"{seq}-0", maxlen=STREAM_ENTRIES)
            if trim:
                pipe.xtrim(self._stream, minid=f"{trim}-0")
            pipe.pexpire(self._stream, EXPIRE_MS)
            await pipe.execute()
        self._refused = 0

    async def _renew(self) -> None:
        """Renew both keys; the log is ``lost`` when they are not as it left them."""
        if not self._changes.lost:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.xrange(self._stream, min=f"({self._seq}-0", count=1)
                pipe.pexpire(self._stream, EXPIRE_MS)
                pipe.pexpire(self._snapshot, EXPIRE_MS)
                pipe.getrange(self._snapshot, 0, SNAPSHOT_HEADER_BYTES - 1)
                pipe.strlen(self._snapshot)
                beyond, *rest = await pipe.execute(raise_on_error=False)
            self._wipe |= beyond != []
            if self._wipe or rest != [True, True, self._header, self._size]:
                log.warning("this worker's cache entries are gone from Redis; writing them again")
                self._changes.lose()
        self._renewed = time.monotonic()


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(seconds, 0.0)):
            await event.wait()
