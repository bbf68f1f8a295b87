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


class CopyCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that an engine takes to copy KV between its pool and frames with each codec, per byte
    of the raw KV. 0 means unknown."""

    read_raw: float = 0.0  # from the pool into a frame
    read_fp8: float = 0.0
    write_raw: float = 0.0  # from a frame into the pool
    write_fp8: float = 0.0


DeviceKind: TypeAlias = Literal["cpu", "cuda"]


class StepSizes(msgspec.Struct, frozen=True):
    """The largest step of an engine."""

    max_batch: int  # sequences
    prefill_chunk: int  # prompt tokens


def default_step_sizes(device: DeviceKind, role: Role) -> StepSizes:
    """Return the sizes of an engine that is configured without them.

    A GPU reads its weights once for all rows of a step, so that rows are nearly free below some 300
    (the FLOPs of an H100 in the time of one byte). Chunks of 2048 tokens are far above that. A
    prefill worker has twice as many, which halves the steps of a long prompt; more tokens would
    compute no faster, while short prompts wait for a whole step, KV leaves after its step, and a
    mask of chunk x context tokens has to fit.
    """
    if device == "cpu":
        return StepSizes(64, 512)
    return StepSizes(256, 4096 if role == "prefill" else 2048)


class StepSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that the scheduler and the KV pool use exactly as they were configured."""

    step_budget_ms: float | None  # of a step with decoding; None: the policy's own; 0: no bound
    ttft_slo_s: float | None  # objectives that the policy's own budget follows
    tpot_slo_s: float | None  # None: unknown, as in an engine without a deployment
    kv_precision: Precision
    batch_invariant: bool  # on a GPU: decode steps have one number of rows


class EngineSettings(StepSettings, frozen=True, kw_only=True):
    """Everything that an engine process is told at its start. None leaves a choice to the engine.

    ``kv_storage`` and ``arena`` have no key: benchmarks and tests set them in code.
    """

    model_path: str
    role: Role
    dtype: str | None
    device: str | None
    threads: int | None
    gpu_share: float | None  # of the GPU's memory; None: all of it, on Ray what it was assigned
    max_batch: int | None  # sequences in a step
    prefill_chunk: int | None  # prompt tokens in a step
    kv_tokens: int | None
    max_model_len: int | None
    kv_storage: StorageChoice = "auto"
    arena: ArenaShape = ArenaShape()
    speculation: SpeculationSettings
    ceilings: MachineCeilings  # as declared; the engine measures what is unknown

    def step_sizes(self, device: DeviceKind) -> StepSizes:
        """Return the sizes of the largest step: as configured, else the default of the device and
        the role that the engine is started with."""
        default = default_step_sizes(device, self.role)
        return StepSizes(
            self.max_batch or default.max_batch, self.prefill_chunk or default.prefill_chunk
        )
