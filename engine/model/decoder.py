"""The decoder: one forward pass over a packed batch, KV written to the pool as it goes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batching.batch import Batch
from engine.kv_cache.kv_pool import KVPool
from engine.model.attention import attend
from engine.model.layers import LayerWeights, Weights
from engine.model.linear import padded_rows
from engine.model.norm_rotary import rotary_table, rotate_
from engine.model_config.config import ModelConfig, row_counts


class Model:
    """Weights and the forward pass. Holds no state of any request."""

    def __init__(self, config: ModelConfig, weights: Weights, max_positions: int) -> None:
        self.config = config
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        tables = {
            rope: rotary_table(rope, config.head_dim, max_positions, self.device)
            for rope in {config.rope, config.local_rope or config.rope}
        }
        self._turns = [tables[config.rope_of(i)] for i in range(config.layers)]
        # Rows are padded where the products are made for numbers of rows
        # (engine/model/linear.py); but
        # padding would choose experts, and have them read.
        self._pads = self.device.type == "cpu" and config.moe is None

    def warm(self, rows: int) -> None:
        """Multiply ``rows`` rows with every kind of weight, so that what is made for this number of
        rows (engine/model/linear.py) is there before a request needs it."""
        c = self.config
        hidden = torch.zeros(rows, c.hidden_size, dtype=self.dtype, device=self.device)
        attended = hidden.new_zeros(rows, c.heads * c.head_dim)
        kinds = {c.is_sparse(i): layer for i, layer in enumerate(self.weights.layers)}
        for layer in kinds.values():
            layer.qkv(hidden)
            layer.out.add(attended, hidden)
            layer.mlp.add(hidden, hidden)
        self.weights.head(hidden)

    def forward(self, batch: Batch, pool: KVPool) -> Tensor:
        """Logits [R, vocab] in fp32 of the rows ``batch.logit_rows``; KV of all rows is in the
        pool afterwards."""
        return self.logits(batch.drawing(self.hidden(batch, pool)))

    def hidden(
        self, batch: Batch, pool: KVPool, taps: dict[int, Tensor | None] | None = None
    ) -> Tensor:
        """The last layer's output [T, hidden] for all rows; their KV is in the pool afterwards.
        ``taps``: layers whose input [T, hidden] is wanted; it is put there."""
        c, rows = self.config, len(batch.tokens)
        x = F.embedding(batch.tokens, self.weights.embedding)  # [T, hidden]
        if c.embedding_scale != 1.0:
            x = x * torch.tensor(c.embedding_scale, dtype=x.dtype)
        if self._pads and padded_rows(rows) != rows:
            x = F.pad(x, (0, 0, 0, padded_rows(rows) - rows))
        turns = {id(table): table[batch.positions][:, None] for table in set(self._turns)}
        for i, layer in enumerate(self.weights.layers):
            if taps and i in taps:
                taps[i] = x[:rows]
            x = self._attention(i, layer, x, turns[id(self._turns[i])], batch, pool)
            x = self._mlp(layer, x)
        return x[:rows]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocab] in fp32 of ``hidden`` [R, hidden], the last layer's output."""
        return self.read(self.weights.final_norm(hidden))

    def read(self, features: Tensor) -> Tensor:
        """The same of ``features``, which the final norm has made of it."""
        c = self.config
        logits = self.weights.head(features).float()
        if c.logit_softcap:
            logits = logits.div_(c.logit_softcap).tanh_().mul_(c.logit_softcap)
        return logits

    def _attention(
        self, i: int, w: LayerWeights, x: Tensor, turn: Tensor, batch: Batch, pool: KVPool
    ) -> Tensor:
        c = self.config
        rows = len(batch.tokens)
        projected = w.qkv(w.attention_norm(x))  # [T, q | k | v]
        heads = projected.view(len(x), c.heads + 2 * c.kv_heads, c.head_dim)[:rows]
        q, kv = heads[:, : c.heads], heads[:, c.heads :].unflatten(1, (2, c.kv_heads))
        if w.q_norm is not None and w.k_norm is not None:
            q.copy_(w.q_norm(q))
            kv[:, 0].copy_(w.k_norm(kv[:, 0]))
        rotate_(heads[:, : c.heads + c.kv_heads], turn)
        pool.store(i, batch.slots, kv)
        out = x.new_zeros(len(x), c.heads * c.head_dim)
        attend(
            q,
            kv,
            pool.layer(i),
            batch.views[c.windows[i]],
            out[:rows].view(rows, c.heads, c.head_dim),
            scale=c.attention_scale,
            softcap=c.attention_softcap,
        )
        if w.attention_out_norm is None:
            return w.out.add(out, x)
        return x + w.attention_out_norm(w.out(out))

    def _mlp(self, w: LayerWeights, x: Tensor) -> Tensor:
        normed = w.mlp_norm(x)
        if w.mlp_out_norm is None:
            return w.mlp.add(normed, x)
        return x + w.mlp_out_norm(w.mlp(normed))


# MERGED engine.warming
# Products of a model on a CPU, made before a request needs them (engine/model/linear.py).

WARM_S = 1.0
"""Most that it may take; what is not ready is made when needed."""


def warm_products(
    model: Model,
    most_rows: int,
    progress: Callable[[float], None] = lambda _: None,
    most_s: float = WARM_S,
) -> None:
    """Make the products of all numbers of rows, the smallest first, as far as ``most_s`` goes."""
    began = time.perf_counter()
    for rows in row_counts(most_rows):
        if (elapsed := time.perf_counter() - began) > most_s:
            break
        progress(elapsed / most_s)
        model.warm(rows)
