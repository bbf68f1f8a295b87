"""Snapshots of a pool for tests of the choice: steps of 10 ms, 1 ms a prompt token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protocol.performance.step_model import StepModel
from router.placement.snapshot import (
    DecodeState,
    LinkEstimates,
    Objectives,
    PlacementQuery,
    PlacementSnapshot,
    PrefillState,
)

GOALS = Objectives(2.0, 0.1)
MODEL = StepModel(step=0.01, row=1e-4, kv_token=1e-7, prompt_token=1e-3, prompt_pair=0.0)
CHUNK = 512


def prefill(instance: str, *, queue_s: float = 0.0, cached: int = 0, **rest: Any) -> PrefillState:
    state = PrefillState(instance, MODEL, CHUNK, queue_s, 1.0, cached)
    return state._replace(**rest)


def decode(
    instance: str, *, queue_s: float = 0.0, cached: int = 0, correction: float = 1.0, **rest: Any
) -> DecodeState:
    own = PrefillState(instance, MODEL, CHUNK, queue_s, correction, cached)
    state = DecodeState(own, batch=0, rows=64, kv_used=0, kv_free=100_000, kv_total=100_000)
    return state._replace(**rest)


def network(
    bandwidth: float = 1e9, active: Mapping[tuple[str, str], int] | None = None
) -> LinkEstimates:
    return LinkEstimates({}, {}, active or {}, bandwidth)


def snapshot(
    prefills: list[PrefillState], decodes: list[DecodeState], net: LinkEstimates | None = None
) -> PlacementSnapshot:
    return PlacementSnapshot(prefills, decodes, net or network(), 100.0)


def query(tokens: int, output: float = 100.0, kv_bytes: float = 1000.0) -> PlacementQuery:
    return PlacementQuery(tokens, output, kv_bytes)
