"""Records as workers and routers write them."""

from __future__ import annotations

from typing import Any

from protocol.registry.directory import ModelInfo, RouterRecord, WorkerRecord, WorkerUtilisation

STEP = (5e-3, 1e-4, 1e-7, 5e-5, 1e-9)
MODEL = ModelInfo(
    id="m",
    fingerprint="f",
    precision="fp8",
    max_model_len=4096,
    vocab_size=8,
    kv_bytes_per_token=1000,
)
WALLS = WorkerUtilisation(
    seconds=10.0,
    busy=0.5,
    compute=0.1,
    bandwidth=0.1,
    capacity=0.1,
    network=0.0,
    starved=0.0,
    kv_wait=0.0,
    batch=1.0,
    kv_share=0.1,
    element_bytes=2,
    kv_shrink=4.0,
    wire_shrink=1.0,
    gpu=False,
    drafts=False,
)


def worker(instance: str, role: str, **fields: Any) -> WorkerRecord:
    known: dict[str, Any] = {
        "endpoint": "127.0.0.1:1",
        "kv_endpoint": "127.0.0.1:2",
        "model": MODEL,
        "pid": 1,
        "engine_pid": 2,
        "kv_tokens_free": 900,
        "kv_tokens_total": 1000,
        "step_model": STEP,
        "max_batch": 16,
        "prefill_chunk": 256,
        "home": role,
    }
    return WorkerRecord(instance=instance, role=role, **(known | fields))


def router(instance: str, metrics_endpoint: str) -> RouterRecord:
    return RouterRecord(instance=instance, model="m", metrics_endpoint=metrics_endpoint, pid=1)
