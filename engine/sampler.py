"""Sampling as a function of (logits, seed, choice, position): no state, no random stream.

    token = argmax over allowed tokens of  logits / temperature + Gumbel(seed, choice, position, t)

The Gumbel-max trick (Gumbel 1954; Maddison et al., A* Sampling, 2014, section 2) draws exactly from
softmax(logits / temperature). Noise comes from a counter-based generator, SplitMix64 (Steele, Lea,
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, section 4), so a token does
not depend on the batch, on speculation, or on the worker that draws it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """``value`` mod 2**64 as torch's int64 holds it."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's output function."""
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def row_key(seed: int, choice: int) -> int:
    """Key of one choice of one request, as int64: computed once, at admission."""
    key = torch.tensor([_signed(seed)]) + _GAMMA
    return int(_mix(_mix(key) ^ _signed(choice * 0xD1B54A32D192ED03)))


GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow fp32."""


def gumbel(keys: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Gumbel(0, 1) noise, [R, vocab] float64. keys, positions: [R] int64; ``positions`` is the
    index of the token to draw in its sequence."""
    counter = torch.arange(1, vocab + 1, device=keys.device).mul_(_GAMMA)
    row = _mix(keys ^ (positions * _MIX1))
    bits = _shift(_mix(row[:, None] + counter), 11)  # 53 random bits
    uniform = bits.double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().log_().neg_()


@dataclass(frozen=True)
class SamplingRows:
    """Parameters of the rows to draw, one element per row: [R]."""

    temperature: Tensor  # float32
    top_p: Tensor  # float32
    keys: Tensor  # int64, of row_key
    positions: Tensor  # int64, index of the token to draw


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Mask logits [R, vocab] outside the smallest set whose probability reaches top_p [R]
    (Holtzman et al., The Curious Case of Neural Text Degeneration, section 3.1)."""
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    probability = ordered.softmax(dim=-1)
    beyond = probability.cumsum(dim=-1) - probability >= top_p[:, None]
    beyond[:, 0] = False  # the most likely token is always allowed, however small top_p is
    drop = torch.zeros_like(beyond).scatter_(1, index, beyond)
    return logits.masked_fill(drop, float("-inf"))


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Tokens [R] int64 drawn from logits [R, vocab] fp32, every row with a temperature."""
    scaled = logits / rows.temperature[:, None]
    narrow = (rows.top_p < 1.0).nonzero()[:, 0]
    if len(narrow):
        scaled[narrow] = keep_top_p(scaled[narrow], rows.top_p[narrow])
    noise = gumbel(rows.keys, rows.positions, logits.shape[-1])
    return noise.add_(scaled).max(dim=-1).indices


def greedy(logits: Tensor) -> Tensor:
    """The most likely token of each row: [R] int64."""
    return logits.max(dim=-1).indices  # on the CPU, a third of argmax's time
