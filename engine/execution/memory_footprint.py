"""Estimates the memory of an engine before anything is loaded, and sizes its KV pool.

weights    every tensor in the type it is computed in, including those of a draft model or heads;
           on a CPU the output head is stored apart from the embedding even if they are tied,
           because it is repacked
kv         all pages of the pool; a draft model has the same number of its own
workspace  the activations of the largest step, including draft nodes, and on a CPU the prepared
           products for each number of rows
runtime    the interpreter and torch
shared     slots for KV frames in both directions (engine/ipc/shared_memory.py)

The loader, ``baton doctor`` and the planner call it; it imports no torch.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from engine.ipc.settings import EngineSettings
from engine.kv_cache.kv_format import KVFormat, Storage
from engine.model_config.checkpoint import WeightShards, resident_elements
from engine.model_config.config import ModelConfig, padded_row_counts
from engine.scheduling.draft_pages import MAX_DRAFT_NODES
from engine.scheduling.sequence import blocks_for
from engine.speculation.draft_source import draft_size
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import StartupError

Device: TypeAlias = Literal["cpu", "cuda"]

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CPU_KV_BYTES = 256 << 20
"""Default limit of the KV pool on a CPU; ``kv_tokens`` overrides it."""
GPU_KV_SHARE = 0.8
"""Share of the GPU memory left after the weights; the rest is workspace."""

# Measured with torch 2.13 on x86-64.
RUNTIME_BYTES: dict[Device, int] = {"cpu": 236 << 20, "cuda": 500 << 20}
_KERNEL_BYTES = 600 << 10  # code and scratch of one product for one number of rows
_PRODUCTS = 5  # distinct products: those of a layer, and the head
_LOGIT_BYTES = 40  # per logit: fp32 value, copies and sort order while a token is drawn


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """Estimated bytes of one engine."""

    device: Device
    dtype: str
    weights: int
    kv: int
    workspace: int
    runtime: int
    shared: int
    kv_tokens: int
    kv_bytes_per_token: int
    kv_grows: bool  # the pool takes the memory left after the weights; ``kv`` is its minimum

    @property
    def total(self) -> int:
        return self.fixed + self.kv

    @property
    def fixed(self) -> int:
        """Bytes of everything except the KV pool."""
        return self.weights + self.workspace + self.runtime + self.shared


def dtype_name(settings: EngineSettings, device: Device) -> str:
    """Return the type that the model computes in. Raise StartupError for an unknown type."""
    name = settings.dtype or ("float32" if device == "cpu" else "bfloat16")
    if name not in ELEMENT_BYTES:
        known = ", ".join(ELEMENT_BYTES)
        raise StartupError(f"dtype {name!r} is not known; expected one of {known}")
    return name


def choose_storage(settings: EngineSettings, device: Device) -> Storage:
    """Return the storage of the KV pool. A GPU is limited by memory, and fp8 halves its KV; on a
    CPU, decoding fp8 bytes costs more time than reading wide values."""
    if settings.kv_storage != "auto":
        return settings.kv_storage
    return "fp8" if settings.kv_precision == "fp8" and device == "cuda" else "wide"


def context_length(settings: EngineSettings, config: ModelConfig) -> int:
    """Return the maximum number of tokens of a sequence."""
    return min(settings.max_model_len or config.max_positions, config.max_positions)


def pool_pages(
    settings: EngineSettings,
    kv: KVFormat,
    max_len: int,
    free_bytes: int | None,
    draft_bytes: int = 0,
) -> int:
    """Return the number of pages of the KV pool. ``free_bytes`` is what a GPU has left after the
    weights, None on a CPU; ``draft_bytes`` is the KV of a draft model per token. Raise StartupError
    for a pool of fewer than two pages."""
    page_bytes = kv.bytes_per_token * BLOCK_TOKENS
    if settings.kv_tokens is not None:
        pages = settings.kv_tokens // BLOCK_TOKENS
    elif free_bytes is not None:
        pages = int(free_bytes * GPU_KV_SHARE) // (page_bytes + draft_bytes * BLOCK_TOKENS)
    else:
        pages = min(CPU_KV_BYTES // page_bytes, settings.max_batch * blocks_for(max_len))
    if pages < 2:
        raise StartupError(
            f"the KV pool would have {pages} pages of {BLOCK_TOKENS} tokens; give it at least"
            f" {2 * BLOCK_TOKENS} tokens ({2 * page_bytes / 2**20:.1f} MiB)"
        )
    return pages


def estimate_footprint(
    settings: EngineSettings, config: ModelConfig, shards: WeightShards | None, device: Device
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
    grows = device == "cuda" and settings.kv_tokens is None
    weights = resident_elements(shards, config, on_cpu=on_cpu) + draft.elements if shards else 0
    # The minimum of a pool that grows is one sequence of maximum length.
    pages = blocks_for(max_len) if grows else pool_pages(settings, kv, max_len, None)
    return Footprint(
        device=device,
        dtype=dtype,
        weights=weights * element,
        kv=pages * BLOCK_TOKENS * kv_bytes,
        workspace=_workspace(settings, config, max_len, device, element, draft.most),
        runtime=RUNTIME_BYTES[device],
        shared=settings.arena.bytes if device == "cpu" else 0,
        kv_tokens=pages * BLOCK_TOKENS,
        kv_bytes_per_token=kv_bytes,
        kv_grows=grows,
    )


def _workspace(
    settings: EngineSettings,
    config: ModelConfig,
    max_len: int,
    device: Device,
    element: int,
    drafted: int,
) -> int:
    """``drafted`` is the maximum number of draft nodes of a sequence in a step."""
    drawing = settings.max_batch + min(
        settings.max_batch * drafted, MAX_DRAFT_NODES
    )  # rows of logits
    c, rows = config, settings.prefill_chunk + drawing
    q, kv = c.heads * c.head_dim, 2 * c.kv_heads * c.head_dim
    # Input, its norm, projections, what attention returns; gate, up and their product.
    attention = rows * (3 * c.hidden_size + 2 * q + kv)
    mlp = rows * (2 * c.hidden_size + 3 * c.intermediate_size)
    context = 2 * max_len * kv + settings.prefill_chunk * max_len  # a gathered prompt, and its mask
    step = (max(attention, mlp) + context) * element + drawing * c.vocab_size * _LOGIT_BYTES
    if device == "cpu":
        step += len(padded_row_counts(rows)) * _PRODUCTS * _KERNEL_BYTES
    return step
