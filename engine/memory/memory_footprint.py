"""Estimates the memory of an engine before anything is loaded, and sizes its KV pool. Pure.

weights    every tensor in the type it is computed in, including those of a draft model or heads;
           on a CPU the output head is stored apart from the embedding even if they are tied,
           because it is repacked; on a GPU also the rotary tables
kv         all pages of the pool; a draft model has the same number of its own
workspace  the activations of the largest step, including draft nodes, and on a CPU the prepared
           products for each number of rows; on a GPU also tables, recorded steps and memory for
           KV frames (engine/memory/workspace.py)
runtime    the interpreter and torch; on a GPU what CUDA takes there
shared     slots for KV frames in both directions (engine/ipc/shared_memory.py)
pinned     the same slots of an engine on a GPU, which are in the host's memory

On a GPU that several engines share, each takes its share and nothing more:

    | engine A: runtime, weights, workspace, KV pool | reserve | engine B: the same | reserve |
    |<----------------- allowed ------------------->|         |<---- allowed ----->|
    |<------------------ share x total ---------------------->|

The loader, ``baton doctor`` and the planner call it; it imports no torch.
"""

from __future__ import annotations

import msgspec

from engine.ipc.settings import DeviceKind, EngineSettings
from engine.kv_cache.kv_format import KVFormat, Storage
from engine.memory.workspace import (
    GpuWork,
    Workspace,
    cpu_workspace,
    gpu_workspace_parts,
    rotary_bytes,
)
from engine.model_config.checkpoint import WeightShards, resident_elements
from engine.model_config.config import ModelConfig
from engine.scheduling.sequence import blocks_for
from engine.speculation.draft_source import DraftSize, draft_size
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import StartupError

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CPU_KV_BYTES = 256 << 20
"""Default limit of the KV pool on a CPU; ``kv_tokens`` overrides it."""
GPU_USABLE_SHARE = 0.9
"""Share of a GPU's memory that is counted out to engines. The rest holds what is not estimated:
fragmentation, and steps whose sequences share long prefixes (engine/memory/workspace.py)."""

# On a CPU measured with torch 2.13 on x86-64; what CUDA takes is an assumption.
RUNTIME_BYTES: dict[DeviceKind, int] = {"cpu": 236 << 20, "cuda": 500 << 20}
_LEAST_TOKENS = 2 * BLOCK_TOKENS  # of a KV pool


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """Estimated bytes of one engine."""

    device: DeviceKind
    dtype: str
    weights: int
    kv: int
    workspace: int
    runtime: int
    shared: int
    kv_tokens: int
    kv_bytes_per_token: int
    kv_grows: bool  # the pool takes the memory that is left; ``kv`` is its minimum
    pinned: int = 0  # of the host, beside an engine on a GPU
    # What ``workspace`` is computed from: the largest of these, which follow each other in a step.
    phases: tuple[Workspace, ...] = (Workspace(),)
    max_len: int = 0  # tokens of the longest sequence

    def with_pool(self, tokens: int) -> Footprint:
        """Return the footprint with a KV pool of this size. A pool smaller than the longest
        sequence bounds the context, and with it the workspace."""
        context = min(tokens, self.max_len)
        return msgspec.structs.replace(
            self,
            kv=tokens * self.kv_bytes_per_token,
            workspace=_largest(self.phases, context, tokens),
            kv_tokens=tokens,
            kv_grows=False,
        )

    @property
    def total(self) -> int:
        return self.fixed + self.kv

    @property
    def fixed(self) -> int:
        """Bytes of everything except the KV pool."""
        return self.weights + self.workspace + self.runtime + self.shared


def dtype_name(settings: EngineSettings, device: DeviceKind) -> str:
    """Return the type that the model computes in. Raise StartupError for an unknown type."""
    name = settings.dtype or ("float32" if device == "cpu" else "bfloat16")
    if name not in ELEMENT_BYTES:
        known = ", ".join(ELEMENT_BYTES)
        raise StartupError(f"dtype {name!r} is not known; expected one of {known}")
    return name


def choose_storage(settings: EngineSettings, device: DeviceKind) -> Storage:
    """Return the storage of the KV pool. A GPU is limited by memory, and fp8 halves its KV; on a
    CPU, decoding fp8 bytes costs more time than reading wide values."""
    if settings.kv_storage != "auto":
        return settings.kv_storage
    return "fp8" if settings.kv_precision == "fp8" and device == "cuda" else "wide"


def context_length(settings: EngineSettings, config: ModelConfig) -> int:
    """Return the maximum number of tokens of a sequence."""
    return min(settings.max_model_len or config.max_positions, config.max_positions)


def configured_pages(settings: EngineSettings, kv: KVFormat, max_len: int) -> int:
    """Return the pages of a KV pool whose size is configured, or that of a CPU. Raise StartupError
    for a pool of fewer than two pages."""
    page_bytes = kv.bytes_per_token * BLOCK_TOKENS
    if settings.kv_tokens is not None:
        pages = settings.kv_tokens // BLOCK_TOKENS
    else:
        most = settings.step_sizes("cpu").max_batch * blocks_for(max_len)
        pages = min(CPU_KV_BYTES // page_bytes, most)
    if pages < 2:
        raise StartupError(
            f"the KV pool would have {pages} pages of {BLOCK_TOKENS} tokens; give it at least"
            f" {2 * BLOCK_TOKENS} tokens ({2 * page_bytes / 2**20:.1f} MiB)"
        )
    return pages


class GpuMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a GPU as one of its engines finds it, in bytes."""

    total: int
    free: int  # now, whichever process has the rest
    share: float = 1.0  # of the total that is this engine's

    @property
    def allowed(self) -> int:
        """Bytes that the engine may take, all in all."""
        return int(self.total * self.share * GPU_USABLE_SHARE)

    @property
    def reserve(self) -> int:
        """Bytes of its share that the engine does not count out."""
        return int(self.total * self.share) - self.allowed

    def left(self, taken: int) -> int:
        """Return the bytes that an engine which has ``taken`` some may still take: the rest of what
        it is allowed, and never more than what is free now."""
        return max(0, min(self.allowed - taken, self.free - self.reserve))


def gpu_pool_tokens(left: int, plan: Footprint) -> int:
    """Return the tokens of the KV pools that ``left`` bytes hold beside the workspace, in whole
    pages."""
    tokens = min(_tokens_beside(left, plan, phase) for phase in plan.phases)
    return max(0, tokens) // BLOCK_TOKENS * BLOCK_TOKENS


def _tokens_beside(left: int, plan: Footprint, phase: Workspace) -> int:
    per_token = plan.kv_bytes_per_token + phase.pool_token
    tokens = (left - phase.step) // (per_token + phase.context_token)
    if tokens > plan.max_len:
        tokens = (left - phase.bytes(plan.max_len, 0)) // per_token
    return tokens


def _largest(phases: tuple[Workspace, ...], context: int, pool: int) -> int:
    return max(phase.bytes(context, pool) for phase in phases)


def gpu_footprint(plan: Footprint, gpu: GpuMemory, taken: int) -> Footprint:
    """Return ``plan`` with the KV pool that an engine gets which has ``taken`` bytes of its GPU;
    it takes the weights of a draft and the workspace later. Raise StartupError with the numbers
    if the configured pool, or the smallest one, does not fit."""
    later = max(0, plan.weights + plan.runtime - taken)
    most = gpu_pool_tokens(gpu.left(taken) - later, plan)
    wanted = _LEAST_TOKENS if plan.kv_grows else plan.kv_tokens
    if wanted > most:
        fitting = (
            f"{most} tokens fit" if most >= _LEAST_TOKENS else "not even the smallest pool fits"
        )
        raise StartupError(
            f"a KV pool of {wanted} tokens does not fit on the GPU ({fitting}):"
            f" {gpu_memory_text(gpu, plan.with_pool(wanted))}"
        )
    return plan.with_pool(most if plan.kv_grows else wanted)


def gpu_memory_text(gpu: GpuMemory, plan: Footprint) -> str:
    """Return in words what an engine takes of its GPU, and what to change."""
    change = "lower worker.kv_tokens, worker.max_batch, worker.prefill_chunk or model.max_len"
    if gpu.share < 1.0:
        change += ", or start fewer workers on each GPU"
    if plan.weights + plan.runtime >= gpu.allowed:
        change = "use a smaller model, a larger GPU, or fewer workers on each GPU"
    return (
        f"{_gib(gpu.total)} in all, {_gib(gpu.free)} free, {_gib(gpu.allowed)} for this engine"
        f" ({gpu.share:.0%} of the GPU, less a reserve); it takes {_gib(plan.weights)} for weights,"
        f" {_gib(plan.kv)} for {plan.kv_tokens} tokens of KV, {_gib(plan.workspace)} for steps,"
        f" {_gib(plan.runtime)} for CUDA; {change}, or end other processes that `nvidia-smi` lists"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def estimate_footprint(
    settings: EngineSettings, config: ModelConfig, shards: WeightShards | None, device: DeviceKind
) -> Footprint:
    """Return the footprint of an engine; without ``shards`` its weights count as 0. Raise
    StartupError for sizes that no engine can have."""
    dtype = dtype_name(settings, device)
    element = ELEMENT_BYTES[dtype]
    kv = config.kv_format(settings.kv_precision, choose_storage(settings, device), element)
    on_cpu = device == "cpu"
    draft = draft_size(settings.speculation, config, element, on_cpu=on_cpu)
    kv_bytes = kv.bytes_per_token + draft.kv_bytes_per_token
    max_len = context_length(settings, config)
    grows = not on_cpu and settings.kv_tokens is None
    weights = 0
    if shards:
        weights = (resident_elements(shards, config, on_cpu=on_cpu) + draft.elements) * element
        weights += 0 if on_cpu else rotary_bytes(config, max_len)
    # The minimum of a pool that grows is one sequence of maximum length.
    pages = blocks_for(max_len) if grows else configured_pages(settings, kv, max_len)
    phases = _phases(settings, config, device, element, draft)
    tokens = pages * BLOCK_TOKENS
    return Footprint(
        device=device,
        dtype=dtype,
        weights=weights,
        kv=tokens * kv_bytes,
        workspace=_largest(phases, max_len if on_cpu else min(tokens, max_len), tokens),
        runtime=RUNTIME_BYTES[device],
        shared=settings.arena.bytes if on_cpu else 0,
        kv_tokens=tokens,
        kv_bytes_per_token=kv_bytes,
        kv_grows=grows,
        pinned=0 if on_cpu else settings.arena.pinned_bytes,
        phases=phases,
        max_len=max_len,
    )


def _phases(
    settings: EngineSettings,
    config: ModelConfig,
    device: DeviceKind,
    element: int,
    draft: DraftSize,
) -> tuple[Workspace, ...]:
    sizes = settings.step_sizes(device)
    if device == "cpu":
        return (cpu_workspace(config, sizes, element, draft.most),)
    work = GpuWork(
        config=config,
        sizes=sizes,
        element=element,
        max_len=context_length(settings, config),
        draft=draft,
        staging=settings.arena.staging_bytes,
    )
    return gpu_workspace_parts(work).phases
