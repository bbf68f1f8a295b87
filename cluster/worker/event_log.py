r"""A worker's side of the cache events: tells Redis what is cached, and never waits for it.

    stored, evicted, cleared --> pending --every 30 ms, or 4096 keys--> XADD <seq>-0 ...
                            \-> keys    --now and then, or ``lost``---> SET snapshot, XADD mark

    following --Redis failed, or has not what was written, or the backlog is too long--> lost
    lost      --a snapshot went out; numbers jump, so that readers notice--------------> following

While ``lost``, nothing is kept but the set of keys: the snapshot will tell. Every second the log
renews both keys and looks whether they still are as it left them.
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
    Change,
    Kind,
    encode_entries,
    encode_snapshot,
    pack_keys,
    snapshot_key,
    stream_key,
)

# MERGED cluster.cache_changes
# What a worker has cached, and which changes of it Redis has not been told.

BACKLOG_KEYS = 16 * ENTRY_KEYS
SNAPSHOT_MIN_CHANGES = 2 * ENTRY_KEYS


class Changes:
    """Bounded: with more than BACKLOG_KEYS to tell, it is ``lost``, and so it starts. Then only
    the set of keys is kept, and a snapshot of it must be told."""

    def __init__(self) -> None:
        self.lost = True
        self.pending_keys = 0
        self._pending: list[Change] = []
        self._keys: dict[bytes, None] = {}  # parents before children, as they were stored
        self._since_told = 0  # keys stored or evicted since the last snapshot

    def stored(self, keys: Sequence[bytes]) -> None:
        self._keys.update(dict.fromkeys(keys))
        self._note(Kind.STORED, keys)

    def evicted(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._keys.pop(key, None)
        self._note(Kind.EVICTED, keys)

    def cleared(self) -> None:
        self._keys.clear()
        self._note(Kind.CLEARED, ())

    def _note(self, kind: Kind, keys: Sequence[bytes]) -> None:
        if not keys and kind is not Kind.CLEARED:
            return
        self._since_told += max(len(keys), 1)
        if self.lost:
            return
        self._pending.append(Change(kind, pack_keys(keys)))
        self.pending_keys += max(len(keys), 1)
        if self.pending_keys > BACKLOG_KEYS:
            self.lose()

    def lose(self) -> None:
        """What was told did not arrive, or too much is to be told."""
        self.lost = True
        self.take()

    def take(self) -> list[Change]:
        """The changes to tell, once, in order."""
        pending, self._pending, self.pending_keys = self._pending, [], 0
        return pending

    def told(self) -> Iterable[bytes]:
        """All keys, for a snapshot that is told now."""
        self.lost = False
        self._since_told = 0
        return islice(self._keys, SNAPSHOT_KEYS)

    @property
    def any(self) -> bool:
        """Something changed since the last snapshot."""
        return self._since_told > 0

    @property
    def many(self) -> bool:
        """So much changed since the last snapshot that a new one is worth its size."""
        return self._since_told >= max(SNAPSHOT_MIN_CHANGES, len(self._keys) // 2)


log = logging.getLogger("baton.events")

DEADLINE_S = 3.0  # of every exchange with Redis
STREAM_ENTRIES = 1000  # about as many the stream keeps


class EventLog:
    """start -> stored, evicted, cleared -> close. One for each instance; its calls come from the
    event loop and only note the change. ``changed_s``: age at which the snapshot of a cache that
    has changed is renewed; ``snapshot_s``: of one that has not."""

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
        self._changes = Changes()
        self._seq = 0  # the highest number that Redis may have seen
        self._base = 0  # number of the last snapshot
        self._header = b""  # how the last snapshot begins,
        self._size = 0  # and its size in bytes
        self._refused = 0  # times in a row that Redis refused what it was given
        self._wipe = False  # the stream is not ours any more: delete it first
        self._renewed = self._published = time.monotonic()
        self._wake = asyncio.Event()
        self._full = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def stored(self, keys: Sequence[bytes]) -> None:
        """These blocks can be found from now on; parents before children."""
        self._changes.stored(keys)
        self._changed()

    def evicted(self, keys: Sequence[bytes]) -> None:
        """These blocks are gone."""
        self._changes.evicted(keys)
        self._changed()

    def cleared(self) -> None:
        """Everything is gone."""
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
        """Stop, and take both keys away if Redis answers. Idempotent."""
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
                    log.warning("cache events reach Redis again")  # as loud as the loss
                failures = 0
            except Exception as error:  # whatever one exchange brings, the next may be good
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
        """Wait for a change and then for more of them; or until the keys must be renewed."""
        await _set_within(self._wake, self._renewed + self._renew_s - time.monotonic())
        if self._wake.is_set():
            await _set_within(self._full, self._flush_s)

    async def _publish(self) -> None:
        """Send what is pending, or everything."""
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
            self._changes.many
            or age >= self._snapshot_s
            or (self._changes.any and age >= self._changed_s)
        )

    async def _send_snapshot(self) -> None:
        entries = [*encode_entries(self._changes.take()), MARK]
        if self._changes.lost and self._seq:
            self._seq += 1  # a number that nobody gets
        seq = self._seq + len(entries)
        snapshot = encode_snapshot(self._instance, seq, self._changes.told())
        trim, self._base = self._base, seq
        self._header, self._size = snapshot[:SNAPSHOT_HEADER_BYTES], len(snapshot)
        await self._send(entries, snapshot, trim)
        self._wipe = False
        self._published = time.monotonic()

    async def _send(self, entries: list[bytes], snapshot: bytes | None, trim: int = 0) -> None:
        """In one exchange. Entries before number ``trim`` are not needed any more."""
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
        """Renew both keys; ``lost`` when they are not as they were left."""
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
                log.warning("what was told of the cache is not in Redis any more; telling it again")
                self._changes.lose()
        self._renewed = time.monotonic()


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(seconds, 0.0)):
            await event.wait()
