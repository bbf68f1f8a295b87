"""The decoder: one forward pass over a packed batch, which also writes the KV to the pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batching.attention_metadata import PackedBatch
from engine.kv_cache.kv_pool import KVPool
from engine.model.attention import apply_rotary_, paged_attention, rotary_table
from engine.model.layers import LayerWeights, ModelWeights
from engine.model_config.config import ModelConfig, padded_row_counts, padded_rows

if TYPE_CHECKING:
    from engine.model.fused_layers import FusedLayers

WARM_UP_LIMIT_S = 1.0
"""Longest duration of ``warm_up_products``; kernels that are missing then are generated on use."""


class DecoderModel:
    """Weights and the forward pass, without state of any request. The engine owns the target model,
    a draft proposer its draft model."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        max_positions: int,
        *,
        kernels: bool | None = None,
    ) -> None:
        """``kernels``: whether the kernels of ``engine.kernels`` compute the layers; None: on a GPU
        that they support."""
        self.config = config
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        tables = {
            rope: rotary_table(rope, config.head_dim, max_positions, self.device)
            for rope in {config.rope, config.local_rope or config.rope}
        }
        self._rotary = [tables[config.rope_of(i)] for i in range(config.layers)]
        # On a CPU rows are padded once per pass (engine/model/linear.py). With experts, padding
        # would choose some and have their weights read.
        self._pads = self.device.type == "cpu" and config.moe is None
        self._fused = self._fuse() if runs_kernels(self.device, kernels) else None

    @property
    def uses_kernels(self) -> bool:
        """Whether batches need what kernels read (``PackedBatch.paged``)."""
        return self._fused is not None

    @property
    def can_be_recorded(self) -> bool:
        """Whether a CUDA graph can contain a pass. Torch's grouped product of experts waits for the
        host except on sm_90 and sm_100 in bfloat16."""
        if self.config.moe is None or self.device.type != "cuda":
            return True
        major, _ = torch.cuda.get_device_capability(self.device)
        return self.dtype == torch.bfloat16 and major in (9, 10)

    @property
    def prompts_by_varlen(self) -> bool:
        """Whether prompts attend without masks."""
        return self._fused is not None and self._fused.prompts_by_varlen

    def _fuse(self) -> FusedLayers:
        # Only an installation for GPUs has Triton, which this module imports.
        from engine.model.fused_layers import FusedLayers

        rotations = {id(t): torch.view_as_real(t).flatten(1) for t in self._rotary}
        ordered = [rotations[id(table)] for table in self._rotary]
        return FusedLayers(self.config, self.weights, ordered)

    def warm_up(self, rows: int) -> None:
        """Multiply ``rows`` rows with every kind of weight, so that the kernels for this number of
        rows exist before a request needs them."""
        c = self.config
        hidden = torch.zeros(rows, c.hidden_size, dtype=self.dtype, device=self.device)
        attended = hidden.new_zeros(rows, c.heads * c.head_dim)
        kinds = {c.is_sparse(i): layer for i, layer in enumerate(self.weights.layers)}
        for layer in kinds.values():
            layer.qkv(hidden)
            layer.out.add(attended, hidden)
            layer.mlp.add(hidden, hidden)
        self.weights.head(hidden)

    def forward(self, batch: PackedBatch, pool: KVPool) -> Tensor:
        """Return logits [R, vocab] in fp32 of the rows ``batch.logit_rows``. The pool holds the KV
        of all rows afterwards."""
        return self.logits(batch.select_logit_rows(self.hidden(batch, pool)))

    def hidden(
        self, batch: PackedBatch, pool: KVPool, taps: dict[int, Tensor | None] | None = None
    ) -> Tensor:
        """Return the last layer's output [T, hidden] for all rows. The pool holds their KV
        afterwards. ``taps``: the input [T, hidden] of each layer that is a key is stored there."""
        c, rows = self.config, len(batch.tokens)
        x = F.embedding(batch.tokens, self.weights.embedding)  # [T, hidden]
        if c.embedding_scale != 1.0:
            x = x * torch.tensor(c.embedding_scale, dtype=x.dtype)
        if self._fused is not None:
            return self._fused.hidden(x, batch, pool, {} if taps is None else taps)
        if self._pads and padded_rows(rows) != rows:
            x = F.pad(x, (0, 0, 0, padded_rows(rows) - rows))
        rotations = {id(table): table[batch.positions][:, None] for table in set(self._rotary)}
        for i, layer in enumerate(self.weights.layers):
            if taps and i in taps:
                taps[i] = x[:rows]
            x = self._attention(i, layer, x, rotations[id(self._rotary[i])], batch, pool)
            x = self._mlp(layer, x)
        return x[:rows]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [R, vocab] in fp32 of ``hidden`` [R, hidden], the last layer's output; they
        are written to ``out`` if it is given."""
        norm = self.weights.final_norm if self._fused is None else self._fused.final_norm
        return self.lm_head(norm(hidden), out)

    def lm_head(self, normed: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [R, vocab] in fp32 of ``normed`` [R, hidden], the final norm's output."""
        c = self.config
        product = self.weights.head(normed)
        logits = product.float() if out is None else out.copy_(product)
        if c.logit_softcap:
            logits = logits.div_(c.logit_softcap).tanh_().mul_(c.logit_softcap)
        return logits

    def _attention(
        self, i: int, w: LayerWeights, x: Tensor, rotation: Tensor, batch: PackedBatch, pool: KVPool
    ) -> Tensor:
        c = self.config
        rows = len(batch.tokens)
        projected = w.qkv(w.attention_norm(x))  # [T, q | k | v]
        heads = projected.view(len(x), c.heads + 2 * c.kv_heads, c.head_dim)[:rows]
        q, kv = heads[:, : c.heads], heads[:, c.heads :].unflatten(1, (2, c.kv_heads))
        if w.q_norm is not None and w.k_norm is not None:
            q.copy_(w.q_norm(q))
            kv[:, 0].copy_(w.k_norm(kv[:, 0]))
        apply_rotary_(heads[:, : c.heads + c.kv_heads], rotation)
        pool.store(i, batch.slots, kv)
        out = x.new_zeros(len(x), c.heads * c.head_dim)
        attended, metadata = out[:rows].view(q.shape), batch.attention[c.windows[i]]
        scale, softcap = c.attention_scale, c.attention_softcap
        paged_attention(q, kv, pool.layer(i), metadata, attended, scale=scale, softcap=softcap)
        if w.attention_out_norm is None:
            return w.out.add(out, x)
        return x + w.attention_out_norm(w.out(out))

    def _mlp(self, w: LayerWeights, x: Tensor) -> Tensor:
        normed = w.mlp_norm(x)
        if w.mlp_out_norm is None:
            return w.mlp.add(normed, x)
        return x + w.mlp_out_norm(w.mlp(normed))


def runs_kernels(device: torch.device, wanted: bool | None) -> bool:
    """Return whether kernels compute the layers: where ``wanted``, else on a GPU of sm_80 or later
    (earlier ones have no bfloat16 products)."""
    if wanted is not None:
        return wanted
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def warm_up_products(
    model: DecoderModel,
    most_rows: int,
    progress: Callable[[float], None] = lambda _: None,
    most_s: float = WARM_UP_LIMIT_S,
) -> None:
    """Generate the kernels of a model on a CPU for all padded row counts up to ``most_rows``, the
    smallest first, until ``most_s`` have passed."""
    began = time.perf_counter()
    for rows in padded_row_counts(most_rows):
        if (elapsed := time.perf_counter() - began) > most_s:
            break
        progress(elapsed / most_s)
        model.warm_up(rows)
