"""The layers of a decoder computed by the kernels of ``engine.kernels``: what a GPU runs.

    x, sum    -> add and norm -> QKV product -> norm of heads, rotation, rounding, pool
              -> attention over the pool     -> output product
              -> add and norm -> gate and up product -> gate -> down product -> x

Ten launches a layer for decode rows. ``DecoderModel`` creates it where kernels run, and is the
reference. Rows of prompts attend by torch's variable-length attention over gathered KV, in its form
whose bits do not depend on the batch (``num_splits=1``), or by torch's general attention where
that form does not exist: fp32, soft caps, and the CPU. In a recorded step, rows of prompts come as
decode rows (engine/batching/prompt_runs.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from engine.batching.attention_metadata import PackedBatch
from engine.kernels.attention import AttentionShape, decode_attention
from engine.kernels.elementwise import add_and_norm, gated, rms_norm
from engine.kernels.gather import gather_slots
from engine.kernels.kv_store import HeadNorms, PoolLayer, rotate_and_store_
from engine.kernels.paged_rows import PromptRows
from engine.kv_cache.kv_pool import Fp8Pool, KVPool, WidePool
from engine.model.attention import paged_attention
from engine.model.layers import LayerWeights, ModelWeights
from engine.model_config.config import ModelConfig


@dataclass(frozen=True)
class _LayerInput:
    """What all layers of one pass have in common."""

    batch: PackedBatch
    pool: KVPool
    layers: list[PoolLayer]


class FusedLayers:
    """The layers of one model. ``rotations`` [positions, head_dim] fp32 hold cos and sin of each
    pair for every layer."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, rotations: list[Tensor]) -> None:
        self._config = config
        self._layers = layers = weights.layers
        self._final_norm = weights.final_norm
        self._rotations = rotations
        self._norms = [_head_norms(layer) for layer in layers]
        self._pool: KVPool | None = None
        self._pool_layers: list[PoolLayer] = []
        for layer in layers:
            layer.mlp.use_gate(gated)

    @cached_property
    def prompts_by_varlen(self) -> bool:
        """Whether rows of prompts attend by torch's variable-length attention in every layer."""
        c = self._config
        q = self._layers[0].attention_norm.weight.new_empty(0, c.heads, c.head_dim)
        return runs_varlen(q, c.attention_softcap, windows=any(c.windows))

    def hidden(
        self, x: Tensor, batch: PackedBatch, pool: KVPool, taps: dict[int, Tensor | None]
    ) -> Tensor:
        """Return the last layer's output [T, hidden] for the embeddings x [T, hidden]; arguments as
        those of ``DecoderModel.hidden``."""
        given = _LayerInput(batch, pool, self._layers_of(pool))
        total: Tensor | None = None  # sum of all outputs but x, the last one
        for i, layer in enumerate(self._layers):
            if i in taps:
                taps[i] = x if total is None else x + total
            x, total = self._layer(i, layer, x, total, given)
        return x if total is None else x + total

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return the last norm's output [R, hidden] for ``hidden`` [R, hidden]."""
        return rms_norm(hidden.contiguous(), self._final_norm.weight, self._final_norm.eps)

    def _layer(
        self, i: int, w: LayerWeights, x: Tensor, total: Tensor | None, given: _LayerInput
    ) -> tuple[Tensor, Tensor]:
        norm = w.attention_norm
        if total is None:
            normed, total = rms_norm(x, norm.weight, norm.eps), x
        else:
            normed, total = add_and_norm(x, total, norm.weight, norm.eps)
        x = w.out(self._attention(i, w.qkv(normed), given))
        if w.attention_out_norm is not None:
            x = rms_norm(x, w.attention_out_norm.weight, w.attention_out_norm.eps)
        normed, total = add_and_norm(x, total, w.mlp_norm.weight, w.mlp_norm.eps)
        x = w.mlp(normed)
        if w.mlp_out_norm is not None:
            x = rms_norm(x, w.mlp_out_norm.weight, w.mlp_out_norm.eps)
        return x, total

    def _attention(self, i: int, projected: Tensor, given: _LayerInput) -> Tensor:
        """Return attention [T, heads * head_dim] for ``projected`` [T, q | k | v]."""
        c, batch, layer = self._config, given.batch, given.layers[i]
        rows = projected.view(len(projected), c.heads + 2 * c.kv_heads, c.head_dim)
        at = (self._rotations[i], batch.positions, batch.slots)
        rotate_and_store_(rows, *at, self._norms[i], layer, c.heads)
        q = rows[:, : c.heads]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        shape = AttentionShape(c.attention_scale, c.attention_softcap, c.windows[i])
        paged = batch.paged
        if paged is not None and paged.decode is not None:
            end = paged.decode_rows
            decode_attention(q[:end], layer, paged.decode, shape, out[:end])
        if paged is not None and (not paged.prompts or self.prompts_by_varlen):
            for prompts in paged.prompts:
                out[prompts.rows] = _prompt_attention(q[prompts.rows], layer, prompts, shape)
        else:
            kv = rows[:, c.heads :].unflatten(1, (2, c.kv_heads))
            metadata, pool = batch.attention[shape.window], given.pool.layer(i)
            scale, softcap = shape.scale, shape.softcap
            paged_attention(q, kv, pool, metadata, out, scale=scale, softcap=softcap)
        return out.flatten(1)

    def _layers_of(self, pool: KVPool) -> list[PoolLayer]:
        if pool is not self._pool:
            self._pool, self._pool_layers = pool, pool_layers(pool)
        return self._pool_layers


def pool_layers(pool: KVPool) -> list[PoolLayer]:
    """Return the layers of ``pool`` as kernels take them."""
    rounds = pool.format.precision == "fp8"
    if isinstance(pool, Fp8Pool):
        pairs = zip(pool.payload.unbind(), pool.exponents.unbind(), strict=True)
        return [PoolLayer(payload, exponents, rounds) for payload, exponents in pairs]
    assert isinstance(pool, WidePool)
    return [PoolLayer(values, None, rounds) for values in pool.tensor.unbind()]


def _head_norms(layer: LayerWeights) -> HeadNorms | None:
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return HeadNorms(layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps)


def runs_varlen(q: Tensor, softcap: float, *, windows: bool) -> bool:
    """Return whether torch's variable-length attention computes queries like q [T, heads,
    head_dim], for ``windows`` in versions of torch that have them."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    dim = q.shape[2]
    if q.device.type != "cuda" or not half or softcap or dim > 256 or dim % 8:
        return False
    return not windows or "window_size" in _varlen_attn()[1]


def _prompt_attention(
    q: Tensor, layer: PoolLayer, prompts: PromptRows, shape: AttentionShape
) -> Tensor:
    """Return attention [T, heads, head_dim] of the rows of all prompt chunks."""
    kv = gather_slots(layer.values, layer.exponents, prompts.key_slots, q.dtype)
    k, v = kv.unbind(1)  # [K, kv_heads, head_dim]
    return varlen_attention(q, k, v, prompts, shape)


@cache
def _varlen_attn() -> tuple[Callable[..., Any], frozenset[str]]:
    """Return torch's variable-length attention and the names of its options."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, prompts: PromptRows, shape: AttentionShape
) -> Tensor:
    """Return causal attention [T, heads, head_dim] by torch.nn.attention.varlen. Versions of torch
    before 2.13 take fewer options: heads are repeated there, and bits may depend on the batch."""
    varlen_attn, known = _varlen_attn()
    options: dict[str, Any] = {}
    if "scale" in known:
        options["scale"] = shape.scale
    else:
        q = q * (shape.scale * q.shape[2] ** 0.5)  # torch divides by the root of the head's size
    group = q.shape[1] // k.shape[1]
    if "enable_gqa" in known:
        options["enable_gqa"] = group > 1
    elif group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if "num_splits" in known:
        options["num_splits"] = 1
    if "is_causal" in known:
        options["is_causal"] = True
    if "window_size" in known:
        # A window counts the token itself; torch's counts the tokens to the left of it.
        options["window_size"] = (shape.window - 1 if shape.window else -1, 0)
    sizes = (prompts.starts, prompts.key_starts, prompts.most_rows, prompts.most_keys)
    out = varlen_attn(q, k, v, *sizes, **options)
    assert isinstance(out, Tensor)
    return out
