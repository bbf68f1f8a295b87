"""The weights of a model in the form that the forward pass multiplies with, built from the tensors
of a checkpoint in Hugging Face's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.attention import interleave_rotary_pairs
from engine.model.linear import Linear, RmsNorm, make_linear
from engine.model.mlp import DenseMlp, ExpertWeights, FeedForward, MoeMlp
from engine.model_config.config import ModelConfig

TensorSource = Callable[[str, tuple[int, ...]], Tensor]
"""Returns the tensor with a name and a shape, from a checkpoint or a generator."""

LinearFactory = Callable[[Tensor, Tensor | None], Linear]
"""Returns the linear layer of a weight [out, in] and its bias [out]."""


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Rows of q and k are interleaved for rotary pairs; norms include their offset."""

    attention_norm: RmsNorm  # [hidden]
    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, hidden]
    q_norm: RmsNorm | None  # [head_dim]
    k_norm: RmsNorm | None  # [head_dim]
    out: Linear  # [hidden, heads * head_dim]
    attention_out_norm: RmsNorm | None  # [hidden]
    mlp_norm: RmsNorm  # [hidden]
    mlp: FeedForward
    mlp_out_norm: RmsNorm | None  # [hidden]


@dataclass(frozen=True)
class ModelWeights:
    """All weights of a decoder."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: RmsNorm  # [hidden]
    head: Linear  # [vocab, hidden]

    @property
    def bytes(self) -> int:
        """Bytes read in a decode step: all but the embedding, of which single rows are read."""
        return self.head.bytes + sum(x.qkv.bytes + x.out.bytes + x.mlp.bytes for x in self.layers)


def build_attention_projections(
    get: TensorSource, c: ModelConfig, module: str, linear: LinearFactory = make_linear
) -> tuple[Linear, Linear]:
    """Return the fused qkv projection [(heads + 2 * kv_heads) * head_dim, hidden] and the output
    projection [hidden, heads * head_dim] of the attention ``module``."""
    h, q, kv = c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim

    def _qkv(kind: str, *inner: int) -> Tensor:
        parts = [
            interleave_rotary_pairs(get(f"{module}q_proj.{kind}", (q, *inner)), c.heads),
            interleave_rotary_pairs(get(f"{module}k_proj.{kind}", (kv, *inner)), c.kv_heads),
            get(f"{module}v_proj.{kind}", (kv, *inner)),
        ]
        return torch.cat(parts)

    weight = _qkv("weight", h)
    bias = _qkv("bias") if c.qkv_bias else None
    out_bias = get(module + "o_proj.bias", (h,)) if c.out_bias else None
    return linear(weight, bias), linear(get(module + "o_proj.weight", (h, q)), out_bias)


def build_dense_mlp(
    get: TensorSource, c: ModelConfig, module: str, linear: LinearFactory = make_linear
) -> FeedForward:
    """Return the gated MLP ``module`` of one layer, from [hidden] to [hidden]."""
    h, n = c.hidden_size, c.intermediate_size
    gate_up = [get(module + "gate_proj.weight", (n, h)), get(module + "up_proj.weight", (n, h))]
    gate_up_bias = down_bias = None
    if c.mlp_bias:
        parts = [get(module + "gate_proj.bias", (n,)), get(module + "up_proj.bias", (n,))]
        gate_up_bias, down_bias = torch.cat(parts), get(module + "down_proj.bias", (h,))
    down = linear(get(module + "down_proj.weight", (h, n)), down_bias)
    return DenseMlp(linear(torch.cat(gate_up), gate_up_bias), down, c.activation)


def _experts(get: TensorSource, c: ModelConfig, layer: str) -> FeedForward:
    moe = c.moe
    assert moe is not None
    h, n, module = c.hidden_size, moe.intermediate_size, f"{layer}{moe.module}."
    gate_up, down = [], []
    for e in range(moe.experts):
        expert = f"{module}experts.{e}."
        gate = get(f"{expert}{moe.gate}.weight", (n, h))
        gate_up.append(torch.cat([gate, get(f"{expert}{moe.up}.weight", (n, h))]))
        down.append(get(f"{expert}{moe.down}.weight", (h, n)))
    router = get(module + "gate.weight", (moe.experts, h))
    weights = ExpertWeights(router, torch.stack(gate_up), torch.stack(down))
    return MoeMlp(weights, moe, c.activation)


def _layer(get: TensorSource, c: ModelConfig, i: int, linear: LinearFactory) -> LayerWeights:
    p = f"model.layers.{i}."

    def _norm(name: str) -> RmsNorm:
        return RmsNorm(get(f"{p}{name}.weight", (c.hidden_size,)) + c.norm_offset, c.norm_eps)

    def _head_norm(name: str) -> RmsNorm:
        weight = get(f"{p}self_attn.{name}.weight", (c.head_dim,)) + c.norm_offset
        return RmsNorm(interleave_rotary_pairs(weight, 1), c.norm_eps)

    sandwich = c.sandwich_norms
    qkv, out = build_attention_projections(get, c, p + "self_attn.", linear)
    return LayerWeights(
        attention_norm=_norm("input_layernorm"),
        qkv=qkv,
        q_norm=_head_norm("q_norm") if c.qk_norm else None,
        k_norm=_head_norm("k_norm") if c.qk_norm else None,
        out=out,
        attention_out_norm=_norm("post_attention_layernorm") if sandwich else None,
        mlp_norm=_norm("pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"),
        mlp=_experts(get, c, p) if c.is_sparse(i) else build_dense_mlp(get, c, p + "mlp.", linear),
        mlp_out_norm=_norm("post_feedforward_layernorm") if sandwich else None,
    )


def build_weights(
    get: TensorSource,
    config: ModelConfig,
    progress: Callable[[float], None] = lambda _: None,
    linear: LinearFactory = make_linear,
) -> ModelWeights:
    """Return the weights built from the tensors of ``get``, whose shapes it checks, and report the
    fraction done in [0, 1]. ``linear`` makes all linear layers but those of experts."""
    shape = (config.vocab_size, config.hidden_size)
    embedding = get("model.embed_tokens.weight", shape)
    layers = []
    for i in range(config.layers):
        layers.append(_layer(get, config, i, linear))
        progress((i + 1) / config.layers)
    head = embedding if config.tied_embeddings else get("lm_head.weight", shape)
    final_norm = get("model.norm.weight", (config.hidden_size,)) + config.norm_offset
    return ModelWeights(
        embedding, tuple(layers), RmsNorm(final_norm, config.norm_eps), linear(head, None)
    )
