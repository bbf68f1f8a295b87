"""What an engine process is told at its start. Torch-free."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from engine.ipc.shared_memory import ArenaShape
from engine.kv_cache.kv_format import Precision, StorageChoice

SpeculationMethod: TypeAlias = Literal["auto", "off", "ngram", "draft", "medusa", "eagle"]
WITH_MODEL: tuple[SpeculationMethod, ...] = ("draft", "medusa", "eagle")
MOST_DRAFTED = 16
"""Tokens that a sequence may be proposed in one step."""


class SpeculationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """``model_path``: the folder of a draft model, or of heads; None: n-grams need none, and the
    demo model has a draft of its own. ``auto``: what lies in that folder; n-grams without one."""

    method: SpeculationMethod = "off"
    model_path: str | None = None
    max_tokens: int = 8


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine can do at most, each second; 0: not said."""

    flops: float = 0.0
    bytes: float = 0.0  # read from memory


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """``None`` leaves the choice to the engine."""

    model_path: str
    role: str
    dtype: str | None = None
    device: str | None = None
    threads: int | None = None
    kv_tokens: int | None = None
    max_batch: int = 64
    chunk: int = 512
    max_model_len: int | None = None
    step_budget_ms: float | None = None  # None: the role's policy has its own; 0: none
    kv_precision: Precision = "fp8"
    kv_storage: StorageChoice = "auto"
    arena: ArenaShape = ArenaShape()
    speculation: SpeculationSpec = SpeculationSpec()
    ceilings: Ceilings = Ceilings()  # as declared; what is not is measured
