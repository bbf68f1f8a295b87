"""Records in Redis that expire unless they are renewed.

Each kind of record has a set of instance ids, and for each id a key with the record as msgpack,
which expires LEASE_S after its last renewal.
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
from redis.exceptions import RedisError, ResponseError

log = logging.getLogger(__name__)

LEASE_S = 5.0
RENEW_S = 1.0


class RegistryRecord(Protocol):
    """Any msgspec struct that names its process."""

    @property
    def instance(self) -> str:
        """Id drawn at the start of the process."""


R = TypeVar("R", bound=RegistryRecord)


class Leases(Generic[R]):
    """Reads and writes one kind of record. Raises RedisError when Redis does not answer.

    Keys are ``{name}s`` and ``{name}:{instance}``. Records that can be decoded, but for which
    ``is_valid`` returns False, are ignored."""

    def __init__(
        self,
        client: redis.Redis,
        name: str,
        kind: type[R],
        is_valid: Callable[[R], bool],
    ) -> None:
        self._redis = client
        self._members = f"{name}s"
        self._prefix = f"{name}:"
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._is_valid = is_valid

    async def renew(self, record: R) -> None:
        """Write the record for LEASE_S more: register its process, or extend the lease."""
        blob = msgspec.msgpack.encode(record)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(self._prefix + record.instance, blob, px=int(LEASE_S * 1000))
            pipe.sadd(self._members, record.instance)
            replies = await pipe.execute(raise_on_error=False)
        if any(_is_wrong_type(reply) for reply in replies):
            # The key holds something that is not a set; other processes come back as they renew.
            await self._redis.unlink(self._members)
            await self._redis.sadd(self._members, record.instance)
            return
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply

    async def remove(self, instance: str) -> None:
        """Delete the record of a process that ends."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.delete(self._prefix + instance)
            pipe.srem(self._members, instance)
            await pipe.execute()

    async def all(self) -> list[R]:
        """Return every record with a live lease. Invalid records are skipped; ids without a lease
        are removed from the set."""
        raw = await self._redis.smembers(self._members)
        members = sorted(m for m in raw if isinstance(m, bytes))
        if not members:
            return []
        blobs = await self._redis.mget([self._prefix.encode() + m for m in members])
        records = []
        gone = []
        for member, blob in zip(members, blobs, strict=True):
            if not isinstance(blob, bytes):
                gone.append(member)
                continue
            try:
                record = self._decoder.decode(blob)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if record.instance.encode() == member and self._is_valid(record):
                records.append(record)
        if gone:
            await self._redis.srem(self._members, *gone)
        return records


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
        lost_s: float | None = None  # since when Redis has not answered
        while not self._gone:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._now.wait(), RENEW_S)
            self._now.clear()
            try:
                await self._leases.renew(self._record())
            except (RedisError, OSError, TimeoutError) as error:
                if lost_s is None:
                    log.warning("the lease is not renewed, Redis does not answer: %s", error)
                    lost_s = time.monotonic()
                continue
            if lost_s is not None:  # logged at the same level as the loss
                away_s = time.monotonic() - lost_s
                log.warning("the lease is renewed, Redis answers again after %.1f s", away_s)
                lost_s = None


def _is_wrong_type(reply: object) -> bool:
    return isinstance(reply, ResponseError) and "WRONGTYPE" in str(reply)
