"""Stateless sampling noise: a function of (seed, choice, position, token).

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


def _as_int64(value: int) -> int:
    """Return ``value`` mod 2**64 in the two's complement of torch's int64."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


_GAMMA = _as_int64(0x9E3779B97F4A7C15)
_MIX1 = _as_int64(0xBF58476D1CE4E5B9)
_MIX2 = _as_int64(0x94D049BB133111EB)
_CPU_TILE = 1 << 16
"""Elements that are mixed at a time on a CPU: some fifty passes over them stay in its cache."""


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64, into a new tensor."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix_(x: Tensor) -> Tensor:
    """SplitMix64's output function, in place."""
    x.bitwise_xor_(_shift(x, 30)).mul_(_MIX1)
    x.bitwise_xor_(_shift(x, 27)).mul_(_MIX2)
    return x.bitwise_xor_(_shift(x, 31))


def noise_key(seed: int, choice: int) -> int:
    """Return the int64 key of one choice of one request; computed once, when it gets its row."""
    key = torch.tensor([_as_int64(seed)]) + _GAMMA
    return int(_mix_(_mix_(key) ^ _as_int64(choice * 0xD1B54A32D192ED03)))


def gumbel_noise(keys: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Compute Gumbel(0, 1) noise of ``tokens``: [rows, k] float64.

    keys, positions: [rows] int64; a position is the index of the token to draw in its sequence.
    tokens: [rows, k] int64, or [k] for all rows alike.
    """
    row = _mix_(keys ^ (positions * _MIX1))
    bits = _shift(_mix_(row[:, None] + (tokens + 1) * _GAMMA), 11)  # 53 random bits
    uniform = bits.double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().log_().neg_()


@dataclass(frozen=True)
class NoiseRows:
    """Inputs of a row's draw beside its logits, one element per row: [rows]."""

    temperature: Tensor  # [rows] float32
    keys: Tensor  # [rows] int64, of ``noise_key``
    positions: Tensor  # [rows] int64, index of the token to draw

    def select(self, rows: Tensor) -> NoiseRows:
        """Return the inputs of ``rows`` [S] int64 only: [S]."""
        return NoiseRows(self.temperature[rows], self.keys[rows], self.positions[rows])


def sample_unfiltered(logits: Tensor, rows: NoiseRows) -> Tensor:
    """Draw a token [rows] int64 per row of logits [rows, vocab] fp32; every token is allowed."""
    vocab = logits.shape[1]
    width = max(1, _CPU_TILE // len(logits)) if logits.device.type == "cpu" else vocab
    token_ids = torch.arange(vocab, device=logits.device)
    scores, tokens = [], []
    for start in range(0, vocab, width):
        tile = slice(start, start + width)
        scaled = logits[:, tile] / rows.temperature[:, None]
        noise = gumbel_noise(rows.keys, rows.positions, token_ids[tile])
        best = noise.add_(scaled).max(dim=-1)
        scores.append(best.values)
        tokens.append(best.indices.add_(start))
    if len(tokens) == 1:
        return tokens[0]
    winner = torch.stack(scores, 1).max(dim=-1, keepdim=True).indices  # [rows, 1]
    return torch.stack(tokens, 1).gather(1, winner)[:, 0]
