"""Trainable Medusa and EAGLE heads, with the parameter names of the published checkpoints.

``heads_recipe`` trains them, ``heads_evaluate`` measures them. The engine serves the exported
weights with networks of its own (``engine.speculation.proposers``). A feature is the hidden state
that the target's LM head reads.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.demo.training.networks import Attention, Llama, LlamaShape, Mlp, Norm


class ResBlock(nn.Module):
    """x + SiLU(W x + b), initialized to return x (Medusa, Cai et al. 2024, section 2.1)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x [..., hidden]."""
        return x + F.silu(self.linear(x))


class TrainableMedusaHeads(nn.ModuleList):
    """Medusa heads: head ``i`` predicts token t + 2 + i from the feature of position t.

    Each is initialized to the target's LM head.
    """

    def __init__(self, heads: int, blocks: int, target: Llama) -> None:
        weight = target.model.embed_tokens.weight
        super().__init__()
        for _ in range(heads):
            lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            with torch.no_grad():
                lm_head.weight.copy_(weight)
            self.append(nn.Sequential(*(ResBlock(weight.shape[1]) for _ in range(blocks)), lm_head))


class TrainableHeadLayer(nn.Module):
    """Decoder layer without a norm before its attention."""

    def __init__(self, s: LlamaShape) -> None:
        super().__init__()
        self.self_attn = Attention(s)
        self.post_attention_layernorm = Norm(s.hidden, s.eps)
        self.mlp = Mlp(s)


class TrainableEagleHead(nn.Module):
    """One decoder layer that predicts feature t + 1 from token t + 1 and feature t.

    Source: EAGLE, Li et al. 2024, section 4.1.
    """

    def __init__(self, s: LlamaShape, seed: int) -> None:
        super().__init__()
        self.shape = s
        self.fc = nn.Linear(2 * s.hidden, s.hidden, bias=False)
        self.layers = nn.ModuleList([TrainableHeadLayer(s)])
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                scale = 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(p, std=0.02 * scale, generator=generator)
        with torch.no_grad():  # fc starts close to copying the feature
            self.fc.weight[:, s.hidden :] += torch.eye(s.hidden)

    def join(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Combine token embeddings and previous features, both [..., hidden], by ``fc``."""
        out: Tensor = self.fc(torch.cat((embedded, features), -1))
        return out


class UnrolledAttention:
    """Attention over the keys and values of an EAGLE head's unrolled training steps.

    Step 0 sees true features. In step s the feature of row r was predicted by step s - 1 from row
    r - 1; so row r attends to rows up to r - s as step 0 computed them, and to row r - s + j as
    step j did, which is what a chain of s drafts attends to when served (HASS, Zhang et al. 2024,
    section 3.2).
    """

    def __init__(self) -> None:
        self.steps: list[tuple[Tensor, Tensor]] = []  # each [batch, heads, length, head_dim]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Add the next step and return its attention; all [batch, heads, length, head_dim]."""
        self.steps.append((k, v))
        step, scale = len(self.steps) - 1, 1 / math.sqrt(q.shape[-1])
        if step == 0:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        first_k, first_v = self.steps[0]
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1 - step)
        scores = (q @ first_k.transpose(-1, -2)).float() * scale
        later = [self._shifted(j, step) for j in range(1, step + 1)]
        own = [((q * key).sum(-1, keepdim=True)).float() * scale for key, _ in later]
        weights = torch.cat([scores.masked_fill(hidden, -1e9), *own], -1).softmax(-1).to(v.dtype)
        out = weights[..., :-step] @ first_v
        for j, (_, value) in enumerate(later):
            at = weights.shape[-1] - step + j
            out = out + weights[..., at : at + 1] * value
        return out

    def _shifted(self, step: int, current: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of ``step``, moved to the rows of step ``current``."""
        back = current - step
        k, v = self.steps[step]
        if not back:
            return k, v
        return F.pad(k, (0, 0, back, 0))[:, :, :-back], F.pad(v, (0, 0, back, 0))[:, :, :-back]


def eagle_step(
    head: TrainableEagleHead, attention: UnrolledAttention, x: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Run one unrolled step on x from ``join``, and return the next features.

    Both are [batch, length, hidden]; cos, sin: [length, head_dim / 2].
    """
    layer = head.layers[0]
    assert isinstance(layer, TrainableHeadLayer)
    attended = attention.attend(*layer.self_attn.project(x, cos, sin)).transpose(1, 2).flatten(2)
    x = x + layer.self_attn.o_proj(attended)
    out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
    return out
