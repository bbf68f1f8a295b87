"""Records in Redis that expire unless they are renewed.

Each kind of record has a set of instance ids, and for each id a key with the record as msgpack,
which expires LEASE_S after its last renewal.

    renew:  SET record PX, SADD id --Redis is full--> PEXPIRE of the record as it was last written
    all:    size of the set --too large--> UNLINK; living processes add themselves again
                            --else--> SMEMBERS, then GETRANGE of each record

What is in Redis may be anything. It costs records at most: never an error but RedisError, and never
more time on the event loop than as many records take.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import msgspec
import redis.asyncio as redis
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from protocol.registry.untrusted import MAX_RECORD_BYTES, decode_untrusted

log = logging.getLogger(__name__)

LEASE_S = 5.0
RENEW_S = 1.0

MAX_MEMBERS = 4096
"""Ids in a set, which is more than any cluster has processes of one kind."""

MAX_SET_BYTES = 2 << 20
"""Memory of such a set in Redis: about 100 bytes for each id."""

MAX_UNREADABLE = 64
"""Records that may be unreadable, as in an update to another version; the ids of more are removed,
so that they are not read again and again."""

_AT_ONCE = 128  # records in one exchange, so that other tasks run in between


class RegistryRecord(Protocol):
    """Any msgspec struct that names its process."""

    @property
    def instance(self) -> str:
        """Id drawn at the start of the process."""


R = TypeVar("R", bound=RegistryRecord)


class Leases(Generic[R]):
    """Reads and writes one kind of record. Raises RedisError when Redis does not answer, or has no
    usable set of ids.

    Keys are ``{name}s`` and ``{name}:{instance}``. Records that cannot be decoded, or for which
    ``is_valid`` returns False, are ignored. ``max_bytes``: of a record."""

    def __init__(
        self,
        client: redis.Redis,
        name: str,
        kind: type[R],
        is_valid: Callable[[R], bool],
        max_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        self._redis = client
        self._max_bytes = max_bytes
        self._members = f"{name}s"
        self._prefix = f"{name}:"
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._is_valid = is_valid

    async def renew(self, record: R) -> bool:
        """Write the record for LEASE_S more: register its process, or extend the lease.

        Return False if Redis is full (``maxmemory`` without eviction): it writes nothing then, but
        extends what it has. Raises OutOfMemoryError where it has nothing."""
        blob = msgspec.msgpack.encode(record)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(self._prefix + record.instance, blob, px=int(LEASE_S * 1000))
            pipe.sadd(self._members, record.instance)
            replies = await pipe.execute(raise_on_error=False)
        if any(_is_wrong_type(reply) for reply in replies):
            # The key holds something that is not a set; other processes come back as they renew.
            await self._redis.unlink(self._members)
            await self._redis.sadd(self._members, record.instance)
            return True
        for reply in replies:
            if isinstance(reply, OutOfMemoryError):
                return await self._extend(record.instance, reply)
            if isinstance(reply, Exception):
                raise reply
        return True

    async def _extend(self, instance: str, error: OutOfMemoryError) -> bool:
        """Extend the record as it was last written; raise ``error`` if it has expired."""
        if not await self._redis.pexpire(self._prefix + instance, int(LEASE_S * 1000)):
            raise error
        return False

    async def remove(self, instance: str) -> None:
        """Delete the record of a process that ends."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.delete(self._prefix + instance)
            pipe.srem(self._members, instance)
            await pipe.execute()

    async def all(self) -> list[R]:
        """Return every record with a live lease. Invalid records are skipped; ids without a lease
        are removed from the set."""
        members = await self._read_members()
        records: list[R] = []
        useless: list[bytes] = []
        unreadable: list[bytes] = []
        for start in range(0, len(members), _AT_ONCE):
            portion = members[start : start + _AT_ONCE]
            for member, blob in zip(portion, await self._read_records(portion), strict=True):
                record = decode_untrusted(self._decoder, blob, self._max_bytes)
                if record is not None and record.instance.encode() == member:
                    if self._is_valid(record):
                        records.append(record)
                else:
                    (unreadable if blob else useless).append(member)
        if len(unreadable) > MAX_UNREADABLE:
            useless += unreadable
        for start in range(0, len(useless), _AT_ONCE):
            await self._redis.srem(self._members, *useless[start : start + _AT_ONCE])
        return records

    async def _read_members(self) -> list[bytes]:
        """Return the ids in the set. Raises ResponseError for one that no cluster can have, after
        deleting it: living processes add themselves again as they renew."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.scard(self._members)
            pipe.memory_usage(self._members, samples=0)
            count, size = await pipe.execute(raise_on_error=False)
        if isinstance(count, Exception) and not _is_wrong_type(count):
            raise count
        # Some services do not allow MEMORY USAGE: then the number of ids is the only bound.
        size = size if isinstance(size, int) else 0
        if isinstance(count, Exception) or count > MAX_MEMBERS or size > MAX_SET_BYTES:
            await self._redis.unlink(self._members)
            raise ResponseError(f"{self._members} was no set of instance ids; it is rebuilt")
        raw = await self._redis.smembers(self._members)
        return sorted(m for m in raw if isinstance(m, bytes))

    async def _read_records(self, members: list[bytes]) -> list[object]:
        """Return the beginning of each record: all of it, if it has a valid length. Empty where
        there is no string."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for member in members:
                pipe.getrange(self._prefix.encode() + member, 0, self._max_bytes)
            replies = await pipe.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, Exception) and not _is_wrong_type(reply):
                raise reply
        return [reply if isinstance(reply, bytes) else b"" for reply in replies]


class LeaseRenewer(Generic[R]):
    """Keeps one record alive: start -> renewed every RENEW_S -> end. Each registered process has
    one.

    Redis may be down for a while: only ``start`` waits for it."""

    def __init__(self, leases: Leases[R], record: Callable[[], R]) -> None:
        self._leases = leases
        self._record = record
        self._now = asyncio.Event()
        self._gone = False
        self._instance = ""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Register at once. Raises RedisError when Redis does not answer."""
        record = self._record()
        await self._leases.renew(record)
        self._begin(record.instance)

    def start_later(self, instance: str) -> None:
        """Register as soon as Redis answers, in the background."""
        self._now.set()
        self._begin(instance)

    def _begin(self, instance: str) -> None:
        self._instance = instance
        self._task = asyncio.create_task(self._renew(), name="lease")

    def renew_now(self) -> None:
        """Write the record now, because it has changed."""
        self._now.set()

    async def end(self) -> None:
        """Delete the record and stop renewing it. Idempotent."""
        self._gone = True  # a client library may swallow a cancellation
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                await self._leases.remove(self._instance)

    async def _renew(self) -> None:
        lost_s: float | None = None  # since when the record was not written
        while not self._gone:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._now.wait(), RENEW_S)
            self._now.clear()
            try:
                written = await self._leases.renew(self._record())
                why = "" if written else "Redis is full, only extended as it was"
            except (RedisError, OSError, TimeoutError) as error:
                why = f"Redis does not answer: {error}"
            if why and lost_s is None:
                log.warning("the lease is not renewed, %s", why)
                lost_s = time.monotonic()
            elif not why and lost_s is not None:  # logged at the same level as the loss
                away_s = time.monotonic() - lost_s
                log.warning("the lease is renewed, Redis answers again after %.1f s", away_s)
                lost_s = None


def _is_wrong_type(reply: object) -> bool:
    return isinstance(reply, ResponseError) and "WRONGTYPE" in str(reply)
