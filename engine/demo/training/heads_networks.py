"""Medusa and EAGLE heads as networks to train, with published checkpoints' parameter names."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.demo.training.networks import Llama, Mlp, Norm, Shape


class ResBlock(nn.Module):
    """x + SiLU(W x + b), which begins as x (Medusa, Cai et al. 2024, section 2.1)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """Head ``i`` reads from the feature of position t, what the model's own head sees there, the
    token of position t + 2 + i. Each begins as the model's own head."""

    def __init__(self, heads: int, blocks: int, target: Llama) -> None:
        weight = target.model.embed_tokens.weight
        super().__init__()
        for _ in range(heads):
            reading = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            with torch.no_grad():
                reading.weight.copy_(weight)
            self.append(nn.Sequential(*(ResBlock(weight.shape[1]) for _ in range(blocks)), reading))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., length, head_dim]; cos, sin: [length, head_dim / 2]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class HeadAttention(nn.Module):
    """The projections of one layer's attention."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [batch, length, hidden] to queries, keys and values, [batch, heads, length, head_dim]
        each; the heads that share a key have a copy each."""
        s = self.shape
        split = [
            (self.q_proj, s.heads, True),
            (self.k_proj, s.kv_heads, True),
            (self.v_proj, s.kv_heads, False),
        ]
        out = []
        for project, heads, turned in split:
            y = project(x).unflatten(-1, (heads, s.head_dim)).transpose(1, 2)
            y = rotate(y, cos, sin) if turned else y
            out.append(y.repeat_interleave(s.heads // heads, 1))
        return out[0], out[1], out[2]


class HeadLayer(nn.Module):
    """A decoder layer without a norm in front of its attention."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.self_attn = HeadAttention(s)
        self.post_attention_layernorm = Norm(s.hidden, s.eps)
        self.mlp = Mlp(s)


class EagleHead(nn.Module):
    """One layer over pairs of (token t + 1, feature t), which yields feature t + 1 (EAGLE, Li et
    al. 2024, section 4.1). A feature is what the model's own head sees."""

    def __init__(self, s: Shape, seed: int) -> None:
        super().__init__()
        self.shape = s
        self.fc = nn.Linear(2 * s.hidden, s.hidden, bias=False)
        self.layers = nn.ModuleList([HeadLayer(s)])
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                scale = 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(p, std=0.02 * scale, generator=generator)
        with torch.no_grad():
            self.fc.weight[:, s.hidden :] += torch.eye(s.hidden)  # begins as the feature before

    def join(self, embedded: Tensor, features: Tensor) -> Tensor:
        """The layer's input: of the tokens' embeddings, and the features before them."""
        out: Tensor = self.fc(torch.cat((embedded, features), -1))
        return out


class Keys:
    """What the unrolled steps of an EAGLE head attend to in training.

    Step 0 sees true features. In step s the feature of row r was predicted by step s - 1 from row
    r - 1; so it attends to rows up to r - s as step 0 computed them, and to row r - s + j as step j
    did, which is what a chain of s drafts meets in use (HASS, Zhang et al. 2024, section 3.2).
    """

    def __init__(self) -> None:
        self.steps: list[tuple[Tensor, Tensor]] = []  # each [batch, heads, length, head_dim]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention of the next step's queries; all [batch, heads, length, head_dim]."""
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

    def _shifted(self, step: int, now: int) -> tuple[Tensor, Tensor]:
        """Keys and values of ``step`` where the queries of step ``now`` meet them."""
        back = now - step
        k, v = self.steps[step]
        if not back:
            return k, v
        return F.pad(k, (0, 0, back, 0))[:, :, :-back], F.pad(v, (0, 0, back, 0))[:, :, :-back]


def eagle_step(head: EagleHead, keys: Keys, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The head's layer on its inputs x [batch, length, hidden]: the next features."""
    layer = head.layers[0]
    assert isinstance(layer, HeadLayer)
    attended = keys.attend(*layer.self_attn.project(x, cos, sin)).transpose(1, 2).flatten(2)
    x = x + layer.self_attn.o_proj(attended)
    out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
    return out


def features(target: Llama, ids: Tensor) -> Tensor:
    """What the target's own head sees of ids [batch, length]: [batch, length, hidden]."""
    x: Tensor = target.model.embed_tokens(ids)
    cos, sin = target.cos[: ids.shape[1]], target.sin[: ids.shape[1]]
    for layer in target.model.layers:
        x = layer(x, cos, sin)
    out: Tensor = target.model.norm(x)
    return out


def read(target: Llama, x: Tensor) -> Tensor:
    """The logits that the target's own head reads from features."""
    return F.linear(x, target.model.embed_tokens.weight)
