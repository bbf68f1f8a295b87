"""Sampling without state: noise is a function of (seed, choice, position, token).

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
_CACHED = 1 << 16
"""Elements that are mixed at a time on a CPU: some fifty passes over them stay in its cache."""


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64, into a new tensor."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix_(x: Tensor) -> Tensor:
    """SplitMix64's output function, in place."""
    x.bitwise_xor_(_shift(x, 30)).mul_(_MIX1)
    x.bitwise_xor_(_shift(x, 27)).mul_(_MIX2)
    return x.bitwise_xor_(_shift(x, 31))


def row_key(seed: int, choice: int) -> int:
    """Key of one choice of one request, as int64: computed once, at admission."""
    key = torch.tensor([_signed(seed)]) + _GAMMA
    return int(_mix_(_mix_(key) ^ _signed(choice * 0xD1B54A32D192ED03)))


def gumbel(keys: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel(0, 1) noise of ``tokens``, [R, K] float64.

    keys, positions: [R] int64; a position is the index of the token to draw in its sequence.
    tokens: [R, K] int64, or [K] for all rows alike.
    """
    row = _mix_(keys ^ (positions * _MIX1))
    bits = _shift(_mix_(row[:, None] + (tokens + 1) * _GAMMA), 11)  # 53 random bits
    uniform = bits.double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().log_().neg_()


@dataclass(frozen=True)
class NoiseRows:
    """What a row's draw depends on beside its logits, one element per row: [R]."""

    temperature: Tensor  # float32
    keys: Tensor  # int64, of row_key
    positions: Tensor  # int64, index of the token to draw

    def of(self, rows: Tensor) -> NoiseRows:
        return NoiseRows(self.temperature[rows], self.keys[rows], self.positions[rows])


def draw_all(logits: Tensor, rows: NoiseRows) -> Tensor:
    """Tokens [R] int64 drawn from logits [R, vocab] fp32, each token allowed."""
    vocab = logits.shape[1]
    width = max(1, _CACHED // len(logits)) if logits.device.type == "cpu" else vocab
    every = torch.arange(vocab, device=logits.device)
    scores, tokens = [], []
    for start in range(0, vocab, width):
        part = slice(start, start + width)
        scaled = logits[:, part] / rows.temperature[:, None]
        noise = gumbel(rows.keys, rows.positions, every[part])
        best = noise.add_(scaled).max(dim=-1)
        scores.append(best.values)
        tokens.append(best.indices.add_(start))
    if len(tokens) == 1:
        return tokens[0]
    winner = torch.stack(scores, 1).max(dim=-1, keepdim=True).indices  # [R, 1]
    return torch.stack(tokens, 1).gather(1, winner)[:, 0]
