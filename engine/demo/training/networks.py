"""Sizes, training recipe and a plain trainable Llama network of the demo target and draft."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.demo.training.corpus import VOCAB_SIZE

MAX_LEN = 4096


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of one Llama model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope_theta: float = 10000.0
    eps: float = 1e-5


TARGET = LlamaShape(hidden=256, layers=6, heads=4, kv_heads=2, head_dim=64, intermediate=704)
DRAFT = LlamaShape(hidden=96, layers=2, heads=2, kv_heads=1, head_dim=64, intermediate=256)


@dataclass(frozen=True)
class PairRecipe:
    """Hyperparameters of a training run. With the text and the shapes they fix the weights."""

    steps: int = 1600
    long_steps: int = 215  # the last steps, on windows of MAX_LEN tokens
    batch_tokens: int = 8192
    window: int = 512
    warmup: int = 60
    decay_steps: int = 485  # the last steps on short windows, in which lr falls to long_lr
    lr: float = 3e-3
    long_lr: float = 5.75e-4
    weight_decay: float = 0.1
    cut_anywhere: float = 1 / 300  # both cuts are explained in corpus.encode()
    long_cut_after_space: float = 1 / 12
    seed: int = 1


class Norm(nn.Module):
    """RMS norm with a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., size]."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to x [..., length, head_dim]; cos, sin: [length, head_dim / 2]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, s: LlamaShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = s.heads, s.kv_heads, s.head_dim
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [batch, length, hidden] to rotated queries, rotated keys, and values.

        Each is [batch, heads, length, head_dim]: keys and values are repeated for every query head
        of a group. cos, sin: [length, head_dim / 2].
        """
        q = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        q, k, group = rotate(q, cos, sin), rotate(k, cos, sin), self.heads // self.kv_heads
        return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend over x [batch, length, hidden]; cos, sin: [length, head_dim / 2]."""
        y = F.scaled_dot_product_attention(*self.project(x, cos, sin), is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """Gated feed-forward block (SwiGLU)."""

    def __init__(self, s: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.down_proj = nn.Linear(s.intermediate, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x [..., hidden]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Pre-norm decoder layer: attention and feed-forward block with residual connections."""

    def __init__(self, s: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(s.hidden, s.eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = Norm(s.hidden, s.eps)
        self.mlp = Mlp(s)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Transform x [batch, length, hidden]; cos, sin: [length, head_dim / 2]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    """Modules that a Hugging Face checkpoint stores under ``model``; ``Llama`` runs them."""

    def __init__(self, s: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, s.hidden)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = Norm(s.hidden, s.eps)


class Llama(nn.Module):
    """Llama with tied embeddings; parameter names are those of a Hugging Face checkpoint."""

    cos: Tensor  # [MAX_LEN, head_dim / 2]
    sin: Tensor

    def __init__(self, s: LlamaShape, seed: int) -> None:
        super().__init__()
        self.shape = s
        self.model = Body(s)
        inverse = s.rope_theta ** -(torch.arange(0, s.head_dim, 2) / s.head_dim)
        angles = torch.arange(MAX_LEN)[:, None] * inverse
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                scale = 1.0
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    scale = 1 / math.sqrt(2 * s.layers)
                nn.init.normal_(p, std=0.02 * scale, generator=generator)

    def features(self, ids: Tensor) -> Tensor:
        """Return the input of the LM head [batch, length, hidden] for ids [batch, length]."""
        x: Tensor = self.model.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.model.norm(x)
        return out

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits [..., vocab] of features [..., hidden]."""
        return F.linear(features, self.model.embed_tokens.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the next-token logits [batch, length, vocab] of ids [batch, length]."""
        return self.logits(self.features(ids))


def parameter_count(model: nn.Module) -> int:
    """Count the trained parameters; tied embeddings count once."""
    return sum(p.numel() for p in model.parameters())


def learning_rate(step: int, recipe: PairRecipe) -> float:
    """Return the rate of a step: warm up, hold, fall to ``long_lr``, then on long windows to 0."""
    left = recipe.steps - step
    if left <= recipe.long_steps:
        return recipe.long_lr * left / recipe.long_steps
    warm = recipe.lr * (step + 1) / recipe.warmup
    decayed = min(1.0, (left - recipe.long_steps) / recipe.decay_steps)
    return min(warm, recipe.long_lr + (recipe.lr - recipe.long_lr) * decayed)


def make_optimizers(
    model: nn.Module, lr: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Create Muon (PyTorch's own) for the layers' matrices, AdamW for all other parameters.

    Embeddings and LM heads, which are recognized by their ``VOCAB_SIZE`` rows, use AdamW too.
    """
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for p in model.parameters():
        (matrices if p.ndim == 2 and len(p) != VOCAB_SIZE else others).append(p)
    return [
        torch.optim.Muon(
            matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
