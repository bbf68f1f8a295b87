"""The weights of a model in the form that it multiplies with, built from a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.linear import Linear, linear
from engine.model.mlp import DenseMlp, ExpertWeights, Mlp, MoeMlp
from engine.model.norm_rotary import RmsNorm, interleave
from engine.model_config.config import ModelConfig


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Rows of q and k are interleaved for rotary pairs; norms carry their offset."""

    attention_norm: RmsNorm  # [hidden]
    qkv: Linear  # [(heads + 2 * kv_heads) * head_dim, hidden]
    q_norm: RmsNorm | None  # [head_dim]
    k_norm: RmsNorm | None  # [head_dim]
    out: Linear  # [hidden, heads * head_dim]
    attention_out_norm: RmsNorm | None  # [hidden]
    mlp_norm: RmsNorm  # [hidden]
    mlp: Mlp
    mlp_out_norm: RmsNorm | None  # [hidden]


@dataclass(frozen=True)
class Weights:
    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: RmsNorm  # [hidden]
    head: Linear  # [vocab, hidden]

    @property
    def bytes(self) -> int:
        """Read in a decode step: everything but the embedding, of which a row is looked up."""
        return self.head.bytes + sum(x.qkv.bytes + x.out.bytes + x.mlp.bytes for x in self.layers)


Get = Callable[[str, tuple[int, ...]], Tensor]
Product = Callable[[Tensor, Tensor | None], Linear]  # of a weight and its bias


def projections(
    get: Get, c: ModelConfig, module: str, product: Product = linear
) -> tuple[Linear, Linear]:
    """(query, key and value in one; output) of one layer's attention."""
    h, q, kv = c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
    weights = [
        interleave(get(module + "q_proj.weight", (q, h)), c.heads),
        interleave(get(module + "k_proj.weight", (kv, h)), c.kv_heads),
        get(module + "v_proj.weight", (kv, h)),
    ]
    bias = None
    if c.qkv_bias:
        parts = [
            interleave(get(module + "q_proj.bias", (q,)), c.heads),
            interleave(get(module + "k_proj.bias", (kv,)), c.kv_heads),
            get(module + "v_proj.bias", (kv,)),
        ]
        bias = torch.cat(parts)
    out_bias = get(module + "o_proj.bias", (h,)) if c.out_bias else None
    return (
        product(torch.cat(weights), bias),
        product(get(module + "o_proj.weight", (h, q)), out_bias),
    )


def dense(get: Get, c: ModelConfig, module: str, product: Product = linear) -> Mlp:
    """One layer's MLP without experts."""
    h, n = c.hidden_size, c.intermediate_size
    gate_up = [get(module + "gate_proj.weight", (n, h)), get(module + "up_proj.weight", (n, h))]
    gate_up_bias = down_bias = None
    if c.mlp_bias:
        parts = [get(module + "gate_proj.bias", (n,)), get(module + "up_proj.bias", (n,))]
        gate_up_bias, down_bias = torch.cat(parts), get(module + "down_proj.bias", (h,))
    down = product(get(module + "down_proj.weight", (h, n)), down_bias)
    return DenseMlp(product(torch.cat(gate_up), gate_up_bias), down, c.activation)


def _experts(get: Get, c: ModelConfig, layer: str) -> Mlp:
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


def _layer(get: Get, c: ModelConfig, i: int, product: Product) -> LayerWeights:
    p = f"model.layers.{i}."

    def norm(name: str) -> RmsNorm:
        return RmsNorm(get(f"{p}{name}.weight", (c.hidden_size,)) + c.norm_offset, c.norm_eps)

    def head_norm(name: str) -> RmsNorm:
        weight = get(f"{p}self_attn.{name}.weight", (c.head_dim,)) + c.norm_offset
        return RmsNorm(interleave(weight, 1), c.norm_eps)

    sandwich = c.sandwich_norms
    qkv, out = projections(get, c, p + "self_attn.", product)
    return LayerWeights(
        attention_norm=norm("input_layernorm"),
        qkv=qkv,
        q_norm=head_norm("q_norm") if c.qk_norm else None,
        k_norm=head_norm("k_norm") if c.qk_norm else None,
        out=out,
        attention_out_norm=norm("post_attention_layernorm") if sandwich else None,
        mlp_norm=norm("pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"),
        mlp=_experts(get, c, p) if c.is_sparse(i) else dense(get, c, p + "mlp.", product),
        mlp_out_norm=norm("post_feedforward_layernorm") if sandwich else None,
    )


def assemble(
    get: Get,
    config: ModelConfig,
    progress: Callable[[float], None] = lambda _: None,
    product: Product = linear,
) -> Weights:
    """Build the weights from ``get(name, shape)``, all but those of experts to be multiplied with
    as ``product`` does; reports the fraction done."""
    shape = (config.vocab_size, config.hidden_size)
    embedding = get("model.embed_tokens.weight", shape)
    layers = []
    for i in range(config.layers):
        layers.append(_layer(get, config, i, product))
        progress((i + 1) / config.layers)
    head = embedding if config.tied_embeddings else get("lm_head.weight", shape)
    final_norm = get("model.norm.weight", (config.hidden_size,)) + config.norm_offset
    return Weights(
        embedding, tuple(layers), RmsNorm(final_norm, config.norm_eps), product(head, None)
    )
