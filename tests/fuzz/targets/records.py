"""Records in Redis (protocol/registry): any bytes at any key cost what they take to read."""

from __future__ import annotations

from typing import Any

import msgspec

from protocol.performance.speculation_profile import parse_speculation
from protocol.performance.step_model import parse_step_model
from protocol.registry.directory import (
    AutoscalerRecord,
    Directory,
    ModelInfo,
    RouterRecord,
    WorkerRecord,
)
from protocol.registry.leases import Leases
from tests.fuzz.byte_reader import ByteReader
from tests.fuzz.target import FuzzTarget
from tests.fuzz.virtual_loop import VirtualLoop

_MODEL = ModelInfo(
    id="m", fingerprint="f", precision="exact", max_model_len=8, vocab_size=8, kv_bytes_per_token=8
)
LIVE_WORKER = WorkerRecord(
    instance="live", role="decode", endpoint="h:1", kv_endpoint="h:2", model=_MODEL, pid=1,
    engine_pid=2,
)  # fmt: skip


class _FakeRedis:
    """What ``Leases.all`` asks of Redis. ``blobs`` are the records by the instance's id."""

    def __init__(self, blobs: dict[bytes, bytes]) -> None:
        self._blobs = blobs

    async def smembers(self, _key: str) -> set[bytes]:
        return set(self._blobs)

    async def srem(self, *_: object) -> None:
        return None

    def pipeline(self, *, transaction: bool) -> _FakePipeline:
        assert not transaction
        return _FakePipeline(self._blobs)


class _FakePipeline:
    """Replies to what ``Leases.all`` sends in one exchange."""

    def __init__(self, blobs: dict[bytes, bytes]) -> None:
        self._blobs = blobs
        self._replies: list[object] = []

    async def __aenter__(self) -> _FakePipeline:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def scard(self, _key: str) -> None:
        self._replies.append(len(self._blobs))

    def memory_usage(self, _key: str, samples: int) -> None:
        self._replies.append(1000 * len(self._blobs) + samples)

    def getrange(self, key: bytes, start: int, end: int) -> None:
        self._replies.append(self._blobs[key.split(b":", 3)[3]][start : end + 1])

    async def execute(self, *, raise_on_error: bool) -> list[object]:
        assert not raise_on_error
        return self._replies


def fuzz_one(data: bytes) -> None:
    """One live record, and beside it the input: as a record, as an id, and within a record."""
    reader = ByteReader(data)
    kind = reader.number(3)
    blob = reader.rest()
    loop = VirtualLoop()
    try:
        loop.run_until_complete(_read(kind, blob))
    finally:
        loop.close()


async def _read(kind: int, blob: bytes) -> None:
    blobs = {b"live": msgspec.msgpack.encode(LIVE_WORKER), b"other": blob, blob[:64] or b"x": blob}
    redis: Any = _FakeRedis(blobs)
    directory = Directory(redis, "c")
    workers = await directory.workers.all()
    assert LIVE_WORKER in workers, "a record of another process hides a live one"
    for worker in workers:
        parse_step_model(worker.step_model)
        parse_speculation(worker.speculation)
    found: Leases[RouterRecord] | Leases[AutoscalerRecord] = (
        directory.routers if kind else directory.autoscalers
    )
    await found.all()


TARGET = FuzzTarget("records", fuzz_one)
