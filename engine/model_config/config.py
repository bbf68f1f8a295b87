"""The shape of a model, and the row counts that its products are made for. Torch-free."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from engine.kv_cache.kv_format import KVFormat, Precision, Storage

Activation: TypeAlias = Literal["silu", "gelu_tanh"]
RopeKind: TypeAlias = Literal["default", "linear", "llama3"]


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding. ``linear`` divides all frequencies by ``factor``; ``llama3`` divides those
    whose wavelength exceeds the original context, and blends those between the two limits."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0


class MoeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The layers whose MLP is a mixture of experts, and the names of its parts in a checkpoint."""

    experts: int
    per_token: int  # number of experts that compute a token
    intermediate_size: int  # of one expert
    renormalize: bool  # whether the weights of the chosen experts are scaled to a sum of one
    layers: tuple[bool, ...]  # for each layer, whether it has experts
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
    rope: RopeConfig
    windows: tuple[int, ...]  # tokens that each layer attends to, including itself; 0: all
    attention_scale: float  # factor of query times key
    local_rope: RopeConfig | None = None  # for layers with a window, where it differs
    moe: MoeConfig | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # queries and keys are normalized, head by head
    sandwich_norms: bool = False  # the outputs of attention and MLP are normalized as well
    norm_offset: float = 0.0  # added to every norm's weight
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    attention_softcap: float = 0.0  # scores become cap * tanh(score / cap); 0: off
    logit_softcap: float = 0.0

    def is_sparse(self, layer: int) -> bool:
        """Return whether the MLP of ``layer`` is a mixture of experts."""
        return self.moe is not None and self.moe.layers[layer]

    def rope_of(self, layer: int) -> RopeConfig:
        return self.local_rope if self.local_rope is not None and self.windows[layer] else self.rope

    def kv_format(self, precision: Precision, storage: Storage, element_bytes: int) -> KVFormat:
        """Return the sizes of this model's KV. Raises StartupError where ``storage`` cannot hold it
        exactly and ``precision`` requires that."""
        return KVFormat(
            precision=precision,
            storage=storage,
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            element_bytes=element_bytes,
        )


def padded_rows(rows: int) -> int:
    """Return the least of 1..8, 12, 16, ... 64, 96, 128, ... that is not below ``rows``. oneDNN
    generates kernels for these row counts only: see engine/model/linear.py."""
    step = 1 if rows <= 8 else 4 if rows <= 32 else 8 if rows <= 64 else 32
    return -(-rows // step) * step


def padded_row_counts(most: int) -> list[int]:
    """Return every result of ``padded_rows`` for 1 to ``most`` rows, in ascending order."""
    return sorted({padded_rows(rows) for rows in range(1, most + 1)})
