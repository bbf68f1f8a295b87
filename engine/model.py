"""The decoder: one forward pass over a packed batch, KV written to the pool as it goes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import attend
from engine.batch import Batch
from engine.config import ModelConfig
from engine.kv_pool import KVPool
from engine.weights import LayerWeights, Weights


def rotary_table(config: ModelConfig, positions: int, device: torch.device) -> Tensor:
    """cos + i sin of every angle: [positions, head_dim / 2] complex64.

    Su et al., RoFormer, section 3.4.2; with Llama 3's scaling, wavelengths beyond the original
    context are stretched by ``factor`` and those between the two borders blended.
    """
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequency = config.rope_theta**-half
    if (scaling := config.rope_scaling) is not None:
        turns = scaling.original_positions * frequency / (2 * math.pi)
        blend = (turns - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        blend = blend.clamp(0, 1)
        frequency = frequency * (blend + (1 - blend) / scaling.factor)
    # transformers rounds the inverse frequencies to fp32 before the product; so do we.
    frequency = frequency.float()
    angles = torch.arange(positions).float()[:, None] * frequency
    return torch.polar(torch.ones_like(angles), angles).to(device)


def rotate_(x: Tensor, turn: Tensor) -> None:
    """Rotary embedding of x [T, heads, head_dim] in place, neighbours paired; turn:
    [T, 1, head_dim / 2] complex64. Computed in fp32 whatever x is."""
    pairs = x.unflatten(-1, (-1, 2))
    if x.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(turn)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * turn))


class Model:
    """Weights and the forward pass. Holds no state of any request."""

    def __init__(self, config: ModelConfig, weights: Weights, max_positions: int) -> None:
        self.config = config
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self._turns = rotary_table(config, max_positions, self.device)

    def forward(self, batch: Batch, pool: KVPool) -> Tensor:
        """Logits [R, vocab] in fp32 of the rows ``batch.logit_rows``; KV of all rows is in the
        pool afterwards."""
        x = F.embedding(batch.tokens, self.weights.embedding)  # [T, hidden]
        turn = self._turns[batch.positions][:, None]  # [T, 1, head_dim / 2]
        for i, layer in enumerate(self.weights.layers):
            x = self._attention(i, layer, x, turn, batch, pool)
            x = self._mlp(layer, x)
        if batch.logit_rows is not None:
            x = x[batch.logit_rows]
        x = self._norm(x, self.weights.final_norm)
        return F.linear(x, self.weights.head).float()

    def _attention(
        self, i: int, w: LayerWeights, x: Tensor, turn: Tensor, batch: Batch, pool: KVPool
    ) -> Tensor:
        c = self.config
        rows = len(x)
        projected = F.linear(self._norm(x, w.attention_norm), w.qkv)  # [T, q | k | v]
        heads = projected.view(rows, c.heads + 2 * c.kv_heads, c.head_dim)
        rotate_(heads[:, : c.heads + c.kv_heads], turn)
        q, kv = heads[:, : c.heads], heads[:, c.heads :]
        pool.by_slot[i].index_copy_(0, batch.slots, projected[:, c.heads * c.head_dim :])
        out = attend(q, kv.unflatten(1, (2, c.kv_heads)), pool.by_page[i], batch)
        return torch.addmm(x, out.reshape(rows, -1), w.out.t())

    def _mlp(self, w: LayerWeights, x: Tensor) -> Tensor:
        gate, up = F.linear(self._norm(x, w.mlp_norm), w.gate_up).chunk(2, dim=-1)
        return torch.addmm(x, F.silu(gate).mul_(up), w.down.t())

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)
