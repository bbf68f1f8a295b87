"""The two models: their shapes, and a plain Llama network to train them with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.demo.training.corpus import VOCAB_SIZE

MAX_LEN = 4096


@dataclass(frozen=True)
class Shape:
    """The sizes of one Llama model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope_theta: float = 10000.0
    eps: float = 1e-5


TARGET = Shape(hidden=256, layers=6, heads=4, kv_heads=2, head_dim=64, intermediate=704)
DRAFT = Shape(hidden=96, layers=2, heads=2, kv_heads=1, head_dim=64, intermediate=256)


class Norm(nn.Module):
    """RMS norm with a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Causal attention with rotary positions; key-value heads are shared by groups of heads."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = s.heads, s.kv_heads, s.head_dim
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(batch, length, heads, self.head_dim).transpose(1, 2)

        def rotate(y: Tensor) -> Tensor:
            a, b = y.float().chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(y.dtype)

        q = rotate(split(self.q_proj(x), self.heads))
        k = rotate(split(self.k_proj(x), self.kv_heads))
        v = split(self.v_proj(x), self.kv_heads)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return out


class Mlp(nn.Module):
    """The gated feed-forward block (SwiGLU)."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.down_proj = nn.Linear(s.intermediate, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and feed-forward, each on the normed input and added to it."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(s.hidden, s.eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = Norm(s.hidden, s.eps)
        self.mlp = Mlp(s)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    """What a Hugging Face checkpoint names ``model``; ``Llama`` runs it."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, s.hidden)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = Norm(s.hidden, s.eps)


class Llama(nn.Module):
    """Llama with tied embeddings; parameter names are those of a Hugging Face checkpoint."""

    cos: Tensor
    sin: Tensor

    def __init__(self, s: Shape, seed: int) -> None:
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

    def forward(self, ids: Tensor) -> Tensor:
        """The logits of the token after each of ``ids`` (batch, length)."""
        x: Tensor = self.model.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def parameter_count(model: nn.Module) -> int:
    """How many numbers are trained; tied embeddings count once."""
    return sum(p.numel() for p in model.parameters())


# MERGED engine.demo.recipe
# The training recipe: its numbers, the learning rate they give, and the optimizers.


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, besides the text and the models' shapes."""

    steps: int = 1600
    long_steps: int = 215  # the last steps, on windows of MAX_LEN tokens
    batch_tokens: int = 8192
    window: int = 512
    warmup: int = 60
    decay_steps: int = 485  # the last steps on short windows, falling from lr to long_lr
    lr: float = 3e-3
    long_lr: float = 5.75e-4
    weight_decay: float = 0.1
    cut_anywhere: float = 1 / 300  # see tokenizer.encode()
    long_cut_after_space: float = 1 / 12
    seed: int = 1


def learning_rate(step: int, recipe: Recipe) -> float:
    """Warm up, hold, fall linearly to ``long_lr``; on the long windows, fall linearly to zero."""
    left = recipe.steps - step
    if left <= recipe.long_steps:
        return recipe.long_lr * left / recipe.long_steps
    warm = recipe.lr * (step + 1) / recipe.warmup
    fallen = min(1.0, (left - recipe.long_steps) / recipe.decay_steps)
    return min(warm, recipe.long_lr + (recipe.lr - recipe.long_lr) * fallen)


def make_optimizers(model: Llama, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon (PyTorch's own) for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = torch.optim.Muon(
        matrices,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(others, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adamw]
