"""The one layer of an EAGLE head, with KV of its own on the page numbers of the target's pool."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention import attend
from engine.batch import View
from engine.config import ModelConfig
from engine.kv_pool import make_pool
from engine.layers import Get, dense, projections
from engine.linear import draft_linear
from engine.model import Model
from engine.norm import RmsNorm
from engine.rotary import rotary_table, rotate_

_WIDENED = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


class HeadLayer:
    """Attention and MLP of a Llama layer, given what its attention reads."""

    def __init__(
        self,
        get: Get,
        config: ModelConfig,
        model: Model,
        *,
        pages: int,
        positions: int,
        inputs: int = 1,
    ) -> None:
        """get: a tensor of the layer by its name and shape. positions: of the longest text.
        inputs: what attention reads is so many times as wide as the layer."""
        self._config = c = config

        def widened(name: str, shape: tuple[int, ...]) -> Tensor:
            wide = (shape[0], shape[1] * inputs) if name.endswith(_WIDENED) else shape
            return get(name, wide)

        self._qkv, self._out = projections(widened, c, "self_attn.", draft_linear)
        norm = get("post_attention_layernorm.weight", (c.hidden_size,))
        self._mlp_norm = RmsNorm(norm, c.norm_eps)
        self._mlp = dense(get, c, "mlp.", draft_linear)
        self._turns = rotary_table(c.rope, c.head_dim, positions, model.device)
        format_ = c.kv_format("exact", "wide", model.dtype.itemsize)
        self._pool = make_pool(format_, pages, model.dtype, model.device)

    def __call__(
        self, x: Tensor, residual: Tensor, positions: Tensor, slots: Tensor, view: View
    ) -> Tensor:
        """The layer's output [T, hidden]. x: [T, inputs * hidden], what attention reads; residual:
        [T, hidden], what its output is added to. positions, slots: [T]. All rows are decode rows of
        ``view``; their KV is in the pool afterwards."""
        c, rows = self._config, len(x)
        heads = self._qkv(x).view(rows, c.heads + 2 * c.kv_heads, c.head_dim)
        q, kv = heads[:, : c.heads], heads[:, c.heads :].unflatten(1, (2, c.kv_heads))
        rotate_(heads[:, : c.heads + c.kv_heads], self._turns[positions][:, None])
        self._pool.store(0, slots, kv)
        out = torch.empty_like(q)
        attend(q, kv, self._pool.layer(0), view, out, scale=c.attention_scale, softcap=0.0)
        y = self._out.add(out.flatten(1), residual)
        return self._mlp.add(self._mlp_norm(y), y)
