"""Root mean square norm (Zhang and Sennrich, 2019, equation 4) and rotary position embedding (Su et
al., RoFormer, section 3.4.2)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model_config.config import RopeConfig


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; weight: [size]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self._eps = eps
        # torch's own norm takes up to 16 times as long as these steps on a CPU.
        self._in_steps = weight.device.type == "cpu" and weight.dtype == torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [..., size] normalized, as a new tensor of the same shape."""
        if not self._in_steps:
            return F.rms_norm(x, self.weight.shape, self.weight, self._eps)
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[-1]).add_(self._eps).rsqrt_()
        return (x * scale).mul_(self.weight)


def rotary_table(rope: RopeConfig, head_dim: int, positions: int, device: torch.device) -> Tensor:
    """Compute cos + i sin of every angle: [positions, head_dim / 2] complex64."""
    half = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequency = rope.theta**-half
    if rope.kind == "linear":
        frequency = frequency / rope.factor
    elif rope.kind == "llama3":
        turns = rope.original_positions * frequency / (2 * math.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0, 1)
        frequency = frequency * (blend + (1 - blend) / rope.factor)
    # transformers rounds the inverse frequencies to fp32 before the product; so do we.
    frequency = frequency.float()
    angles = torch.arange(positions).float()[:, None] * frequency
    return torch.polar(torch.ones_like(angles), angles).to(device)


def apply_rotary_(x: Tensor, rotation: Tensor) -> None:
    """Apply the rotary embedding to x [T, heads, head_dim] in place, in fp32 whatever x is.

    rotation: [T, 1, head_dim / 2] complex64, rows of ``rotary_table``. A pair is two neighbours of
    the last dimension: see ``interleave_rotary_pairs``.
    """
    pairs = x.unflatten(-1, (-1, 2))
    if x.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotation)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()) * rotation))


def interleave_rotary_pairs(weight: Tensor, heads: int) -> Tensor:
    """Reorder each head's rows [heads * head_dim, ...] from halves (i, i + d/2) to neighbours
    (2i, 2i + 1).

    The rotary embedding is one complex product then. Queries and keys are permuted alike, so their
    dot products, and with them the model, stay the same.
    """
    dim = len(weight) // heads
    return weight.view(heads, 2, dim // 2, -1).transpose(1, 2).reshape(weight.shape)
