"""The directory of live processes in Redis: its keys, its records, and how they are checked.

    baton:{cluster}:workers    baton:{cluster}:worker:{instance}    WorkerRecord
    baton:{cluster}:routers    baton:{cluster}:router:{instance}    RouterRecord
    baton:{cluster}:autoscalers    baton:{cluster}:autoscaler:{instance}    AutoscalerRecord

Every process registers itself through ``LeaseRenewer``; routers, autoscaler and CLI read. A missing
record is a hint that its worker is gone, not a proof: a router that holds an open stream to it
knows better. Records from Redis are checked like all input from a network.
"""

from __future__ import annotations

import ipaddress
import math
import re
import secrets
from typing import Literal, TypeAlias, get_args
from urllib.parse import urlsplit

import msgspec
import redis.asyncio as redis

from protocol.performance.speculation_profile import SpeculationProfile
from protocol.registry.leases import Leases
from protocol.roles import ROLES

Wall: TypeAlias = Literal["compute", "bandwidth", "capacity", "network"]
WALLS: tuple[Wall, ...] = get_args(Wall)


class WorkerUtilisation(msgspec.Struct, frozen=True, kw_only=True):
    """How close a worker came to each ceiling ("wall") of its machine over the last seconds.

        compute     FLOPs done, as a share of what the machine could have done while steps ran
        bandwidth   bytes moved in memory, likewise
        capacity    pages of the KV pool in use, over the whole time; counted as all pages while the
                    next sequence waits for pages
        network     KV received, as a share of what the link could have carried in the whole time

    All but the times are shares, 0 .. 1. Compute and bandwidth refer to the time in which steps
    ran, so they show what bounds a step. ``busy`` is the share of that time in the whole: an idle
    worker is bound by nothing, however slow its steps. cluster/worker/utilisation.py measures it;
    router/walls and the planner read it.
    """

    seconds: float  # that were measured
    busy: float  # share of the time in which a step ran
    prompt_tokens_s: float = 0.0  # prompt tokens/s that were computed
    compute: float
    bandwidth: float
    capacity: float
    network: float
    starved: float  # share of the time in which the next sequence waited for pages
    kv_wait: float  # sequences, on average, that waited only for KV on its way
    batch: float  # sequences that decoded, on average over steps in which any did
    kv_share: float  # share of KV in the bytes moved; the rest is weights
    element_bytes: int  # of a weight
    kv_shrink: float  # factor by which fp8 would shrink the KV pool; 1: it is fp8
    wire_shrink: float  # the same for KV on the wire
    gpu: bool
    drafts: bool  # it speculates

    def share_of(self, wall: Wall) -> float:
        """Return the utilisation of one ceiling, 0 .. 1."""
        return float(getattr(self, wall))

    @property
    def is_valid(self) -> bool:
        """Whether a worker can have measured this; records from Redis are not trusted."""
        shares = (self.busy, self.starved, self.kv_share, *(self.share_of(wall) for wall in WALLS))
        others = (self.seconds, self.prompt_tokens_s, self.kv_wait, self.batch)
        return (
            all(0.0 <= share <= 1.0 for share in shares)
            and all(value >= 0.0 and math.isfinite(value) for value in others)
            and 1 <= self.element_bytes <= 8
            and all(1.0 <= shrink <= 16.0 for shrink in (self.kv_shrink, self.wire_shrink))
        )


_MAX_COUNT = 1 << 48  # of tokens, requests, bytes, or a process id
_MAX_COEFFICIENTS = 16
_MAX_TEXT = 256
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model that a worker serves, as far as other processes need to know it."""

    id: str
    fingerprint: str
    precision: str  # KV precision: "exact" | "fp8"
    max_model_len: int
    vocab_size: int
    kv_bytes_per_token: int


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as registered. Endpoints are ``host:port``."""

    instance: str
    role: str  # "prefill" | "decode": its present role
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
    step_model: tuple[float, ...] = ()  # a StepModel, as last fitted
    queued_prompts: int = 0  # that ``queued_tokens`` are of
    computed_tokens: int = 0  # of these prompts, already computed
    speculation: SpeculationProfile | None = None  # None: it drafts nothing
    draining: bool = False  # it takes no further requests
    home: str = ""  # role that it was started for; "": the same as ``role``
    changing: bool = False  # it drains before it takes the other role
    max_batch: int = 0  # sequences in a step; 0: unknown
    prefill_chunk: int = 0  # prompt tokens in a step; 0: unknown
    metrics_endpoint: str = ""  # "": none
    link_bytes_s: float = 0.0  # its share of the network, as declared; 0: unknown
    walls: WorkerUtilisation | None = None  # None: not measured yet

    @property
    def lent(self) -> bool:
        """Whether it serves the other pool than the one it was started for."""
        return bool(self.home) and self.home != self.role


class RouterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One router as registered, so that its own metrics are found behind a shared ingress."""

    instance: str
    model: str
    metrics_endpoint: str
    pid: int
    url: str = ""  # where clients reach it; "": unknown


class AutoscalerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One autoscaler as registered, so that its metrics are found."""

    instance: str
    model: str
    metrics_endpoint: str
    pid: int


def new_instance_id() -> str:
    """Return a random 128-bit id, drawn at every start of a process."""
    return secrets.token_hex(16)


class Directory:
    """The records of one cluster. Their methods raise RedisError when Redis does not answer."""

    def __init__(self, client: redis.Redis, cluster: str) -> None:
        base = f"baton:{cluster}:"
        self.workers = Leases(client, base + "worker", WorkerRecord, _is_valid_worker)
        self.routers = Leases(client, base + "router", RouterRecord, _is_valid_router)
        self.autoscalers = Leases(
            client, base + "autoscaler", AutoscalerRecord, _is_valid_autoscaler
        )


def _is_valid_worker(record: WorkerRecord) -> bool:
    """Return whether a worker can have written this record; other processes will connect to its
    endpoints."""
    texts = (record.instance, record.endpoint, record.kv_endpoint, record.metrics_endpoint)
    counts = (
        *(record.running, record.waiting, record.queued_tokens, record.kv_tokens_free),
        *(record.kv_tokens_total, record.max_batch, record.prefill_chunk, record.pid),
        *(record.engine_pid, record.queued_prompts, record.computed_tokens),
    )
    return (
        record.role in ROLES
        and record.home in ("", *ROLES)
        and all(_is_plain(t) for t in texts)
        and _is_endpoint(record.endpoint)
        and _is_endpoint(record.kv_endpoint)
        and (not record.metrics_endpoint or _is_endpoint(record.metrics_endpoint))
        and all(0 <= count <= _MAX_COUNT for count in counts)
        and 0.0 <= record.link_bytes_s < math.inf
        and len(record.step_model) <= _MAX_COEFFICIENTS
        and _is_valid_model(record.model)
        and (record.walls is None or record.walls.is_valid)
    )


def _is_valid_model(model: ModelInfo) -> bool:
    texts = (model.id, model.fingerprint, model.precision)
    counts = (model.max_model_len, model.vocab_size, model.kv_bytes_per_token)
    return all(len(t) <= _MAX_TEXT for t in texts) and all(0 <= c <= _MAX_COUNT for c in counts)


def _is_valid_router(record: RouterRecord) -> bool:
    texts = (record.instance, record.model, record.metrics_endpoint, record.url)
    return (
        all(_is_plain(t) for t in texts)
        and (not record.metrics_endpoint or _is_endpoint(record.metrics_endpoint))
        and (not record.url or _is_url(record.url))
    )


def _is_valid_autoscaler(record: AutoscalerRecord) -> bool:
    texts = (record.instance, record.model, record.metrics_endpoint)
    return all(_is_plain(t) for t in texts) and _is_endpoint(record.metrics_endpoint)


def _is_endpoint(text: str) -> bool:
    """Return whether ``text`` is exactly host:port: it becomes part of URLs, and decides which
    hosts are dialled."""
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
    return text.isascii() and text.isprintable() and len(text) <= _MAX_TEXT
