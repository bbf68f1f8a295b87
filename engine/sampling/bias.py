"""Logit bias, and the ban of end and stop tokens before ``min_tokens``.

Both touch a few tokens of a row; a step is one indexed operation over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


def flat_index(tokens: Tensor, at: Tensor, vocab: int) -> Tensor:
    """Where ``tokens`` [S, W] of the logits' rows ``at`` [S] are in the flat logits: [S, W]."""
    return tokens + (at * vocab)[:, None]


@dataclass(frozen=True)
class BiasRows:
    """Biases of the rows that have any, padded with bias 0 for token 0."""

    at: Tensor  # [S] int64, rows of the logits
    tokens: Tensor  # [S, W] int64
    bias: Tensor  # [S, W] float32


def add_bias_(logits: Tensor, rows: BiasRows) -> None:
    """Add the biases to logits [R, vocab] in place."""
    index = flat_index(rows.tokens, rows.at, logits.shape[1])
    logits.view(-1).index_add_(0, index.flatten(), rows.bias.flatten())


@dataclass(frozen=True)
class BanRows:
    """Tokens that end a text, of the rows that have not yet as many as they must; padded with the
    first one."""

    at: Tensor  # [S] int64, rows of the logits
    tokens: Tensor  # [S, W] int64
    until: Tensor  # [S] int64: banned while fewer tokens than these are in the sequence


def ban_(logits: Tensor, rows: BanRows, positions: Tensor, sparing: bool = False) -> None:
    """Make it impossible, in place, to draw a banned token. logits: [R, vocab]; positions: [R]
    int64, the index of the token to draw. ``sparing``: not where nothing else is left to draw."""
    flat = logits.view(-1)
    index = flat_index(rows.tokens, rows.at, logits.shape[1])
    before = flat[index]  # [S, W]
    banned = (positions[rows.at] < rows.until)[:, None]
    flat[index] = before.masked_fill(banned, float("-inf"))
    if sparing:
        left = logits[rows.at].max(dim=-1, keepdim=True).values > float("-inf")  # [S, 1]
        flat[index] = before.masked_fill(banned & left, float("-inf"))
