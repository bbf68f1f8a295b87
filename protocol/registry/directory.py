"""The directory of live processes in Redis: key schema, writer and reader (see ``leases``).

    baton:{cluster}:workers    baton:{cluster}:worker:{instance}    WorkerRecord
    baton:{cluster}:routers    baton:{cluster}:router:{instance}    RouterRecord
    baton:{cluster}:autoscalers    baton:{cluster}:autoscaler:{instance}    AutoscalerRecord

A record that is gone is a hint that the worker is, not a proof: who holds an open stream to it
knows better. What comes back from Redis is checked like anything from a network.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from urllib.parse import urlsplit

import msgspec
import redis.asyncio as redis
from redis.exceptions import RedisError

from protocol.errors import StartupError
from protocol.registry.leases import LEASE_S, RENEW_S, Leases
from protocol.registry.worker_utilisation import Walls
from protocol.roles import ROLES

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


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
    role: str  # "prefill" | "decode": what it does now
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
    step_model: tuple[float, ...] = ()  # c0 .. c4 of engine/scheduling/step_time.py, as last fitted
    pace: float = 1.0  # tokens of a sequence in the time of a plain step: 1 without speculation
    draining: bool = False  # it takes nothing new
    home: str = ""  # role that it was started for; "": that of ``role``
    changing: bool = False  # it drains to take the other role
    max_batch: int = 0  # sequences in a step; 0: not said
    prefill_chunk: int = 0  # prompt tokens in a step; 0: not said
    metrics_endpoint: str = ""  # "": none
    link_bytes_s: float = 0.0  # its share of the network, as declared; 0: not said
    walls: Walls | None = None  # None: not known yet

    @property
    def lent(self) -> bool:
        """Whether it works for the other pool than the one it was started for."""
        return bool(self.home) and self.home != self.role


class RouterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One router as registered, so that its metrics are found behind an ingress that several
    share."""

    instance: str
    model: str
    metrics_endpoint: str
    pid: int
    url: str = ""  # where clients reach it; "": not said


class AutoscalerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One autoscaler as registered, so that its metrics are found."""

    instance: str
    model: str
    metrics_endpoint: str
    pid: int


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
        of = f"baton:{cluster}:"
        workers, routers = (of + "workers", of + "worker:"), (of + "routers", of + "router:")
        scalers = of + "autoscalers", of + "autoscaler:"
        self.leases = Leases(client, *workers, WorkerRecord, _is_sane)
        self.routers = Leases(client, *routers, RouterRecord, _is_sane_router)
        self.autoscalers = Leases(client, *scalers, AutoscalerRecord, _is_sane_autoscaler)

    async def renew(self, record: WorkerRecord) -> None:
        """Register a worker, or extend its lease and refresh its load."""
        await self.leases.renew(record)

    async def remove(self, instance: str) -> None:
        """A worker goes."""
        await self.leases.remove(instance)

    async def workers(self) -> list[WorkerRecord]:
        """Every worker with a live lease."""
        return await self.leases.all()


def _is_sane(record: WorkerRecord) -> bool:
    """Whether a record can be of a worker: what nobody could connect to is garbage."""
    texts = (record.instance, record.endpoint, record.kv_endpoint, record.metrics_endpoint)
    counts = (record.running, record.waiting, record.queued_tokens, record.kv_tokens_total)
    return (
        record.role in ROLES
        and record.home in ("", *ROLES)
        and all(_is_plain(t) for t in texts)
        and _is_endpoint(record.endpoint)
        and _is_endpoint(record.kv_endpoint)
        and (not record.metrics_endpoint or _is_endpoint(record.metrics_endpoint))
        and min(counts) >= 0
        and (record.walls is None or record.walls.sane)
    )


def _is_sane_router(record: RouterRecord) -> bool:
    texts = (record.instance, record.model, record.metrics_endpoint, record.url)
    return (
        all(_is_plain(t) for t in texts)
        and (not record.metrics_endpoint or _is_endpoint(record.metrics_endpoint))
        and (not record.url or _is_url(record.url))
    )


def _is_sane_autoscaler(record: AutoscalerRecord) -> bool:
    texts = (record.instance, record.model, record.metrics_endpoint)
    return all(_is_plain(t) for t in texts) and _is_endpoint(record.metrics_endpoint)


def _is_endpoint(text: str) -> bool:
    """host:port and nothing else: it becomes part of URLs, and says who may be talked to."""
    host, _, port = text.rpartition(":")
    if not (port.isdecimal() and len(port) <= 5 and 0 < int(port) <= 65535):
        return False
    return bool(_NAME.fullmatch(host)) or _is_bracketed(host)


def _is_bracketed(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return host.startswith("[") and host.endswith("]") and "%" not in host


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname and parts.port)
    except ValueError:  # no port, or no address
        return False


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and len(text) <= 256


__all__ = [
    "LEASE_S",
    "RENEW_S",
    "AutoscalerRecord",
    "Directory",
    "ModelInfo",
    "RedisError",
    "RouterRecord",
    "WorkerRecord",
    "check_url",
    "connect",
    "new_instance_id",
]
