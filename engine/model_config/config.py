"""Shape of a model. Torch-free."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from engine.kv_cache.kv_format import KVFormat, Precision, Storage

Activation: TypeAlias = Literal["silu", "gelu_tanh"]
RopeKind: TypeAlias = Literal["default", "linear", "llama3"]


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding. ``linear`` divides all frequencies by ``factor``; ``llama3`` those whose
    wavelength exceeds the original context, and blends those between the two borders."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0


class Moe(msgspec.Struct, frozen=True, kw_only=True):
    """Layers whose MLP is a mixture of experts, and how a checkpoint names its parts."""

    experts: int
    per_token: int  # experts that compute a token
    intermediate_size: int  # of one expert
    renormalize: bool  # the weights of the chosen experts add up to one
    layers: tuple[bool, ...]  # which layers
    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder of any supported family. Sizes are in elements, positions in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    rope: Rope
    windows: tuple[int, ...]  # tokens that each layer attends to, the own one included; 0: all
    attention_scale: float  # of query times key
    local_rope: Rope | None = None  # of layers with a window, where it differs
    moe: Moe | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # queries and keys are normed, head by head
    sandwich_norms: bool = False  # what attention and MLP return is normed as well
    norm_offset: float = 0.0  # added to every norm's weight
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    attention_softcap: float = 0.0  # scores become cap * tanh(score / cap); 0: as they are
    logit_softcap: float = 0.0

    def is_sparse(self, layer: int) -> bool:
        """Whether the MLP of ``layer`` is a mixture of experts."""
        return self.moe is not None and self.moe.layers[layer]

    def rope_of(self, layer: int) -> Rope:
        return self.local_rope if self.local_rope is not None and self.windows[layer] else self.rope

    def kv_format(self, precision: Precision, storage: Storage, element_bytes: int) -> KVFormat:
        """Sizes of this model's KV. Raises StartupError for a pool that cannot be exact."""
        return KVFormat(
            precision=precision,
            storage=storage,
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            element_bytes=element_bytes,
        )


# MERGED engine.rows
# Numbers of rows that products with a weight are made for (engine/model/linear.py). Torch-free.


def padded_rows(rows: int) -> int:
    """The least of 1..8, 12, 16, ... 64, 96, 128, ... that is not below ``rows``."""
    step = 1 if rows <= 8 else 4 if rows <= 32 else 8 if rows <= 64 else 32
    return -(-rows // step) * step


def row_counts(most: int) -> list[int]:
    """Every number of rows that ``padded_rows`` gives, up to the one for ``most``."""
    return sorted({padded_rows(rows) for rows in range(1, most + 1)})
