"""What a record in Redis may say: anybody who writes there can make one up."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from protocol.registry.directory import (
    ModelInfo,
    RouterRecord,
    WorkerRecord,
    _is_valid_router,
    _is_valid_worker,
)

WORKER = WorkerRecord(
    instance="a" * 32,
    role="decode",
    endpoint="10.0.0.1:7000",
    kv_endpoint="[fd00::1]:7001",
    model=ModelInfo(
        id="m",
        fingerprint="f",
        precision="fp8",
        max_model_len=128,
        vocab_size=8,
        kv_bytes_per_token=8,
    ),
    pid=1,
    engine_pid=2,
    metrics_endpoint="worker-1.example.com:9000",
)
ROUTER = RouterRecord(
    instance="b" * 32,
    model="m",
    metrics_endpoint="localhost:9001",
    pid=3,
    url="https://10.0.0.1:8000",
)

NO_ENDPOINTS = [
    "localhost:80@192.0.2.2/latest/x?",
    "localhost:80/path",
    "192.0.2.2/x?:80",
    "user@localhost:80",
    "[::1]:x@",
    "[::1",
    "[fe80::1%eth0]:80",
    "::1:80",
    "[localhost]:80",
    "localhost",
    "localhost:",
    ":80",
    "localhost:0",
    "localhost:65536",
    "localhost:+80",
    "localhost:\uff18\uff10",
    "local host:80",
    "local\\host:80",
    "local#host:80",
]


def test_real_ones_are_sane() -> None:
    assert _is_valid_worker(WORKER) and _is_valid_worker(replace(WORKER, metrics_endpoint=""))
    assert _is_valid_router(ROUTER) and _is_valid_router(replace(ROUTER, url=""))


@pytest.mark.parametrize("text", NO_ENDPOINTS)
@pytest.mark.parametrize("field", ["endpoint", "kv_endpoint", "metrics_endpoint"])
def test_an_endpoint_is_a_host_and_a_port(field: str, text: str) -> None:
    assert not _is_valid_worker(replace(WORKER, **{field: text}))
    if field == "metrics_endpoint":
        assert not _is_valid_router(replace(ROUTER, metrics_endpoint=text))


@pytest.mark.parametrize("url", ["garbage", "file:///etc/passwd", "http://x:99999", "https://x"])
def test_a_url_is_one(url: str) -> None:
    assert not _is_valid_router(replace(ROUTER, url=url))
