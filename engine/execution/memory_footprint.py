"""What an engine takes of memory, worked out before anything is loaded. Torch-free.

weights    every tensor in the type it is computed in, those of a draft model or of heads too;
           on a CPU the head lies beside the embedding even where they are tied, because it is
           laid out anew
kv         pages of the pool, as if all were written: the system hands them out as they are; a
           draft model has as many of its own
workspace  the largest step's activations, those of draft nodes too, and what is made for each
           number of rows
runtime    the interpreter and torch
shared     slots of KV on their way in and out (engine/ipc/shared_memory.py)
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from engine.ipc.spec import EngineSpec
from engine.kv_cache.kv_format import KVFormat, Storage
from engine.model_config.checkpoint import Shards, kept_elements
from engine.model_config.config import ModelConfig, row_counts
from engine.scheduling.sequence import MOST_NODES, blocks_for
from engine.speculation.draft_source import draft_size
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import StartupError

Device: TypeAlias = Literal["cpu", "cuda"]

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CPU_KV_BYTES = 256 << 20
"""Most that the KV pool takes on a CPU by itself; ``kv_tokens`` asks for more."""
GPU_KV_SHARE = 0.8
"""Of the memory that is free once the weights are loaded; the rest is workspace."""

# Measured with torch 2.13 on x86-64.
RUNTIME_BYTES: dict[Device, int] = {"cpu": 236 << 20, "cuda": 500 << 20}
_KERNEL_BYTES = 600 << 10  # code and scratch of one product for one number of rows
_PRODUCTS = 5  # of a layer, and the head
_LOGIT_BYTES = 40  # a row's logits in fp32, their copies and orders while one is drawn


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one engine."""

    device: Device
    dtype: str
    weights: int
    kv: int
    workspace: int
    runtime: int
    shared: int
    kv_tokens: int
    kv_bytes_per_token: int
    kv_grows: bool  # the pool takes what is free once the weights are there; ``kv`` is its least

    @property
    def total(self) -> int:
        return self.fixed + self.kv

    @property
    def fixed(self) -> int:
        """All but the KV pool."""
        return self.weights + self.workspace + self.runtime + self.shared


def dtype_name(spec: EngineSpec, device: Device) -> str:
    """What the model is computed in. Raises StartupError for a type that is not known."""
    name = spec.dtype or ("float32" if device == "cpu" else "bfloat16")
    if name not in ELEMENT_BYTES:
        known = ", ".join(ELEMENT_BYTES)
        raise StartupError(f"dtype {name!r} is not known; expected one of {known}")
    return name


def storage(spec: EngineSpec, device: Device) -> Storage:
    """On a GPU memory binds, and fp8 halves what KV takes of it; on a CPU turning bytes into
    values costs more than reading them."""
    if spec.kv_storage != "auto":
        return spec.kv_storage
    return "fp8" if spec.kv_precision == "fp8" and device == "cuda" else "wide"


def context_length(spec: EngineSpec, config: ModelConfig) -> int:
    """Most tokens of a sequence."""
    return min(spec.max_model_len or config.max_positions, config.max_positions)


def pool_pages(
    spec: EngineSpec, kv: KVFormat, max_len: int, free_bytes: int | None, draft_bytes: int = 0
) -> int:
    """Pages of the KV pool; ``free_bytes``: of the GPU with the weights on it, None on a CPU;
    ``draft_bytes``: for each token, that a draft model's KV takes beside.

    Raises StartupError for a pool that could serve nothing."""
    page_bytes = kv.bytes_per_token * BLOCK_TOKENS
    if spec.kv_tokens is not None:
        pages = spec.kv_tokens // BLOCK_TOKENS
    elif free_bytes is not None:
        pages = int(free_bytes * GPU_KV_SHARE) // (page_bytes + draft_bytes * BLOCK_TOKENS)
    else:
        pages = min(CPU_KV_BYTES // page_bytes, spec.max_batch * blocks_for(max_len))
    if pages < 2:
        raise StartupError(
            f"the KV pool would have {pages} pages of {BLOCK_TOKENS} tokens; give it at least"
            f" {2 * BLOCK_TOKENS} tokens ({2 * page_bytes / 2**20:.1f} MiB)"
        )
    return pages


def footprint(
    spec: EngineSpec, config: ModelConfig, shards: Shards | None, device: Device
) -> Footprint:
    """Of one engine; without ``shards`` the weights count as none.

    Raises StartupError for sizes that make no engine."""
    dtype = dtype_name(spec, device)
    element = ELEMENT_BYTES[dtype]
    kv = config.kv_format(spec.kv_precision, storage(spec, device), element)
    on_cpu = device == "cpu"
    draft = draft_size(spec.speculation, config, element, on_cpu=on_cpu)
    kv_bytes = kv.bytes_per_token + draft.kv_bytes_per_token
    max_len = context_length(spec, config)
    grows = device == "cuda" and spec.kv_tokens is None
    weights = kept_elements(shards, config, on_cpu=on_cpu) + draft.elements if shards else 0
    # Least of a pool that grows: one sequence of full length.
    pages = blocks_for(max_len) if grows else pool_pages(spec, kv, max_len, None)
    return Footprint(
        device=device,
        dtype=dtype,
        weights=weights * element,
        kv=pages * BLOCK_TOKENS * kv_bytes,
        workspace=_workspace(spec, config, max_len, device, element, draft.most),
        runtime=RUNTIME_BYTES[device],
        shared=spec.arena.bytes if device == "cpu" else 0,
        kv_tokens=pages * BLOCK_TOKENS,
        kv_bytes_per_token=kv_bytes,
        kv_grows=grows,
    )


def _workspace(
    spec: EngineSpec, config: ModelConfig, max_len: int, device: Device, element: int, drafted: int
) -> int:
    """``drafted``: nodes of a sequence in a step at most."""
    drawing = spec.max_batch + min(spec.max_batch * drafted, MOST_NODES)  # rows of logits
    c, rows = config, spec.chunk + drawing
    q, kv = c.heads * c.head_dim, 2 * c.kv_heads * c.head_dim
    # Input, its norm, projections, what attention returns; gate, up and their product.
    attention = rows * (3 * c.hidden_size + 2 * q + kv)
    mlp = rows * (2 * c.hidden_size + 3 * c.intermediate_size)
    context = 2 * max_len * kv + spec.chunk * max_len  # a gathered prompt, and its mask
    step = (max(attention, mlp) + context) * element + drawing * c.vocab_size * _LOGIT_BYTES
    if device == "cpu":
        step += len(row_counts(rows)) * _PRODUCTS * _KERNEL_BYTES
    return step
