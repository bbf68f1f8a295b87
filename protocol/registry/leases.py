"""Records in Redis that expire unless they are renewed: who is there.

A set of instance ids, and a key for each with its record as msgpack, which expires LEASE_S after it
was renewed.
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


class Record(Protocol):
    """A msgspec struct."""

    @property
    def instance(self) -> str:
        """Id of this start of the process."""


R = TypeVar("R", bound=Record)


class Leases(Generic[R]):
    """Writer and reader of one kind of record. Raises RedisError when Redis does not answer.

    ``is_sane``: whether a record that could be decoded can be of anybody."""

    def __init__(
        self,
        client: redis.Redis,
        members: str,
        prefix: str,
        kind: type[R],
        is_sane: Callable[[R], bool],
    ) -> None:
        self._redis = client
        self._members = members
        self._prefix = prefix
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._is_sane = is_sane

    async def renew(self, record: R) -> None:
        """Register, or extend the lease and refresh what the record says."""
        blob = msgspec.msgpack.encode(record)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(self._prefix + record.instance, blob, px=int(LEASE_S * 1000))
            pipe.sadd(self._members, record.instance)
            replies = await pipe.execute(raise_on_error=False)
        if any(_is_wrong_type(reply) for reply in replies):
            # Somebody wrote something else there; the others come back as they renew.
            await self._redis.unlink(self._members)
            await self._redis.sadd(self._members, record.instance)
            return
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply

    async def remove(self, instance: str) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.delete(self._prefix + instance)
            pipe.srem(self._members, instance)
            await pipe.execute()

    async def all(self) -> list[R]:
        """Every one with a live lease. Garbage is passed over; ids without a lease are swept."""
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
            if record.instance.encode() == member and self._is_sane(record):
                records.append(record)
        if gone:
            await self._redis.srem(self._members, *gone)
        return records


class Presence(Generic[R]):
    """Keeps one record alive: start -> renewed each RENEW_S -> end.

    Redis may be away for a while: nobody waits for it but ``start``."""

    def __init__(self, leases: Leases[R], record: Callable[[], R]) -> None:
        self._leases = leases
        self._record = record
        self._now = asyncio.Event()
        self._gone = False
        self._instance = ""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Register. Raises RedisError when Redis does not answer."""
        record = self._record()
        await self._leases.renew(record)
        self._begin(record.instance)

    def start_later(self, instance: str) -> None:
        """Register when Redis answers; until then nobody waits."""
        self._now.set()
        self._begin(instance)

    def _begin(self, instance: str) -> None:
        self._instance = instance
        self._task = asyncio.create_task(self._renew(), name="lease")

    def renew_now(self) -> None:
        """The record has changed: others had better know."""
        self._now.set()

    async def end(self) -> None:
        """Take the record away. Idempotent."""
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
            if lost_s is not None:  # as loud as the loss: who has read of that waits for this
                away_s = time.monotonic() - lost_s
                log.warning("the lease is renewed, Redis answers again after %.1f s", away_s)
                lost_s = None


def _is_wrong_type(reply: object) -> bool:
    return isinstance(reply, ResponseError) and "WRONGTYPE" in str(reply)
