"""A worker as the directory shows it, put together from those who know."""

from __future__ import annotations

import os
from dataclasses import dataclass

from cluster.roles import Roles
from cluster.settings import WorkerSettings
from cluster.walls import WallWatch
from engine import messages as m
from engine.client import EngineClient
from protocol.blocks import BLOCK_TOKENS
from protocol.directory import ModelInfo, WorkerRecord


@dataclass(frozen=True)
class Registered:
    """What does not change while a worker is registered. Endpoints are ``host:port``."""

    instance: str
    model: ModelInfo
    endpoint: str
    kv_endpoint: str
    metrics_endpoint: str


def model_info(settings: WorkerSettings, ready: m.Ready) -> ModelInfo:
    """What the others must know of the model."""
    return ModelInfo(
        id=settings.model_id,
        fingerprint=ready.fingerprint,
        precision=ready.kv.precision,
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        kv_bytes_per_token=ready.kv.bytes_per_token,
    )


def worker_record(
    registered: Registered,
    settings: WorkerSettings,
    roles: Roles,
    engine: EngineClient,
    walls: WallWatch,
) -> WorkerRecord:
    """As it is now; without an engine its load is none."""
    session = engine.current
    beat = session.beat if session is not None else m.Beat(0, 0, 0, 0)
    ready = session.ready if session is not None else None
    return WorkerRecord(
        instance=registered.instance,
        role=roles.role,
        home=roles.home,
        changing=roles.changing,
        draining=roles.changing or roles.leaving,
        endpoint=registered.endpoint,
        kv_endpoint=registered.kv_endpoint,
        metrics_endpoint=registered.metrics_endpoint,
        model=registered.model,
        pid=os.getpid(),
        engine_pid=session.process.pid if session is not None else 0,
        running=beat.running,
        waiting=beat.waiting,
        queued_tokens=beat.queued_tokens,
        kv_tokens_free=beat.pages_free * BLOCK_TOKENS,
        kv_tokens_total=ready.kv_tokens if ready is not None else 0,
        step_model=beat.step_model,
        pace=beat.pace,
        max_batch=settings.max_batch,
        prefill_chunk=settings.prefill_chunk,
        link_bytes_s=1e9 * (settings.link_gb_per_s or 0.0),
        walls=walls.now(),
    )
