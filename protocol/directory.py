"""The directory of live workers in Redis: key schema, writer and reader.

    baton:{cluster}:workers              set of instance ids
    baton:{cluster}:worker:{instance}    WorkerRecord as msgpack; expires LEASE_S after renewal

A record that is gone is a hint that the worker is, not a proof: who holds an open stream to it
knows better. What comes back from Redis is checked like anything from a network.
"""

from __future__ import annotations

import secrets

import msgspec
import redis.asyncio as redis
from redis.exceptions import RedisError, ResponseError

from protocol.errors import StartupError

LEASE_S = 5.0
RENEW_S = 1.0


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the others must know of the model that a worker serves."""

    id: str
    fingerprint: str
    precision: str  # KV precision: "exact"
    max_model_len: int
    vocab_size: int
    kv_bytes_per_token: int


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as registered. Endpoints are ``host:port``."""

    instance: str
    role: str  # "prefill" | "decode"
    endpoint: str
    kv_endpoint: str
    model: ModelInfo
    pid: int
    engine_pid: int
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    kv_tokens_free: int = 0
    kv_tokens_total: int = 0
    step_model: tuple[float, ...] = ()  # c0 .. c4 of engine/step_time.py, as last fitted
    draining: bool = False
    max_batch: int = 0  # sequences in a step; 0: not said
    prefill_chunk: int = 0  # prompt tokens in a step; 0: not said


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(WorkerRecord).decode


def new_instance_id() -> str:
    """A random 128-bit id, drawn at every start of a worker and compared for equality only."""
    return secrets.token_hex(16)


def connect(url: str) -> redis.Redis:
    """A client for ``redis://``, ``rediss://`` or ``unix://`` with deadlines on every operation.

    With ``rediss://`` the server must prove its name by a certificate that this machine trusts, or
    that ``?ssl_ca_certs=FILE`` does."""
    return redis.Redis.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0)


def check_url(url: str) -> None:
    """Raises StartupError for a URL that ``connect`` cannot use. The URL is not repeated: what is
    wrong may be a password."""
    try:
        redis.ConnectionPool.from_url(url).make_connection()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, RedisError):
        raise StartupError(
            "the Redis URL cannot be used: it must be redis://[[user]:password@]host[:port][/db],"
            " rediss://... for TLS, or unix:///path, with options that redis-py knows; a password"
            " has %2F %3F %23 %40 %25 for / ? # @ %"
        ) from None


class Directory:
    """Both sides of the schema. Raises RedisError when Redis does not answer."""

    def __init__(self, client: redis.Redis, cluster: str) -> None:
        self._redis = client
        self._members = f"baton:{cluster}:workers"
        self._prefix = f"baton:{cluster}:worker:"

    async def renew(self, record: WorkerRecord) -> None:
        """Register, or extend the lease and refresh the load."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(self._prefix + record.instance, _encode(record), px=int(LEASE_S * 1000))
            pipe.sadd(self._members, record.instance)
            replies = await pipe.execute(raise_on_error=False)
        if any(_is_wrong_type(reply) for reply in replies):
            # Somebody wrote something else there; the other workers come back as they renew.
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

    async def workers(self) -> list[WorkerRecord]:
        """Every worker with a live lease. Garbage is passed over; ids without a lease are swept."""
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
                record = _decode(blob)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if record.instance.encode() == member and _is_sane(record):
                records.append(record)
        if gone:
            await self._redis.srem(self._members, *gone)
        return records


def _is_sane(record: WorkerRecord) -> bool:
    """Whether a record can be of a worker: what nobody could connect to is garbage."""
    texts = (record.instance, record.endpoint, record.kv_endpoint)
    counts = (record.running, record.waiting, record.queued_tokens, record.kv_tokens_total)
    return (
        record.role in ("prefill", "decode")
        and all(t.isascii() and t.isprintable() and len(t) <= 256 for t in texts)
        and record.endpoint.rpartition(":")[2].isdecimal()
        and min(counts) >= 0
    )


def _is_wrong_type(reply: object) -> bool:
    return isinstance(reply, ResponseError) and "WRONGTYPE" in str(reply)


__all__ = [
    "LEASE_S",
    "RENEW_S",
    "Directory",
    "ModelInfo",
    "RedisError",
    "WorkerRecord",
    "check_url",
    "connect",
    "new_instance_id",
]
