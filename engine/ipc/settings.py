"""The settings of an engine process. Torch-free: the front sends them as JSON on standard input.

Keys of the configuration have no default here: ``cluster.config.schema`` declares each key once,
with its default, help and check, and ``cluster.config.assemble`` makes ``EngineSettings`` from it.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from engine.ipc.shared_memory import ArenaShape
from engine.kv_cache.kv_format import Precision, StorageChoice
from protocol.roles import Role

SpeculationMethod: TypeAlias = Literal["auto", "off", "ngram", "draft", "medusa", "eagle"]
METHODS_WITH_MODEL: tuple[SpeculationMethod, ...] = ("draft", "medusa", "eagle")
MAX_DRAFT_TOKENS = 16
"""Upper bound of the tokens that a proposer drafts for one sequence in one step."""


class SpeculationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine drafts tokens. ``model_path`` is the folder of a draft model or of heads; it is
    None for n-grams. The method ``auto`` takes what lies in that folder, and n-grams without one.
    """

    method: SpeculationMethod
    model_path: str | None
    max_tokens: int  # drafted for a sequence in one step, 1 to MAX_DRAFT_TOKENS


class MachineCeilings(msgspec.Struct, frozen=True, kw_only=True):
    """Rates that a machine reaches at most, per second. 0 means unknown."""

    flops: float = 0.0
    bytes: float = 0.0  # read from memory


class StepSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that the scheduler and the KV pool use exactly as they were configured."""

    max_batch: int  # sequences in a step
    prefill_chunk: int  # prompt tokens in a step
    step_budget_ms: float | None  # of a step with decoding; None: the policy's own; 0: no bound
    kv_precision: Precision


class EngineSettings(StepSettings, frozen=True, kw_only=True):
    """Everything that an engine process is told at its start. None leaves a choice to the engine.

    ``kv_storage`` and ``arena`` have no key: benchmarks and tests set them in code.
    """

    model_path: str
    role: Role
    dtype: str | None
    device: str | None
    threads: int | None
    kv_tokens: int | None
    max_model_len: int | None
    kv_storage: StorageChoice = "auto"
    arena: ArenaShape = ArenaShape()
    speculation: SpeculationSettings
    ceilings: MachineCeilings  # as declared; the engine measures what is unknown
