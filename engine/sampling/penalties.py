"""Repetition, presence and frequency penalties, on the tokens that a sequence already has.

Only logits of tokens in a row's history change, so a step works on [rows, longest history], not on
the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# MERGED engine.sampling.bias
# Logit bias, and the ban of end and stop tokens before ``min_tokens``.
#
# Both touch a few tokens of a row; a step is one indexed operation over all of them.


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


@dataclass(frozen=True)
class PenaltyRows:
    """Penalties of the rows that have any: [S]."""

    at: Tensor  # int64, rows of the logits
    seats: Tensor  # int64, rows of the History
    repetition: Tensor  # float32; 1: off
    presence: Tensor  # float32; 0: off
    frequency: Tensor  # float32; 0: off


def penalised(logits: Tensor, counts: Tensor, rows: PenaltyRows) -> Tensor:
    """Logits after penalties, elementwise: logits, counts (in the output) [S, W] -> [S, W].

    The repetition penalty is for tokens of prompt and output alike, and divides positive logits,
    multiplies others (Keskar et al., CTRL, 2019, section 4.1, as transformers has it). Presence and
    frequency are subtracted for tokens of the output only (OpenAI's API reference).
    """
    repetition = rows.repetition[:, None]
    out = torch.where(logits > 0, logits / repetition, logits * repetition)
    out -= rows.frequency[:, None] * counts
    out -= rows.presence[:, None] * (counts > 0)
    return out


class History:
    """Tokens of each row and their counts in its output; a row is written by ``seat``."""

    def __init__(self, rows: int, length: int, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self.tokens = torch.zeros((rows, length), dtype=torch.int64, device=device)
        self.counts = torch.zeros((rows, vocab), dtype=torch.int32, device=device)

    def seat(self, row: int, tokens: Sequence[int], prompt: int) -> None:
        """Row ``row`` belongs to a sequence of ``tokens``, the first ``prompt`` its prompt."""
        known = torch.tensor(tokens, device=self.tokens.device)
        self.tokens[row] = known[0]  # beyond its end, a row repeats a token that it has
        self.tokens[row, : len(tokens)] = known
        self.counts[row] = 0
        one = torch.ones(len(tokens) - prompt, dtype=torch.int32, device=known.device)
        self.counts[row].index_add_(0, known[prompt:], one)

    def penalise_(
        self, logits: Tensor, rows: PenaltyRows, longest: int, ancestors: Tensor | None = None
    ) -> None:
        """Apply penalties to logits [R, vocab] in place; no row has more than ``longest`` tokens.

        ancestors: [R, D] int64, tokens that follow a row's own, padded with -1; None: none. A token
        that occurs twice is written twice, with the same value.
        """
        tokens = self.tokens[rows.seats, :longest]  # [S, longest]
        flat = logits.view(-1)
        index = flat_index(tokens, rows.at, self._vocab)
        if ancestors is None:
            flat[index] = penalised(flat[index], self._counted(rows, tokens), rows)
            return
        drafts = ancestors[rows.at]  # [S, D]
        # In place of padding a token that is there anyway.
        after = torch.where(drafts < 0, tokens[:, :1], drafts)
        places = flat_index(after, rows.at, self._vocab)
        before = flat[places]
        flat[index] = penalised(flat[index], self._counted(rows, tokens), rows)
        more = (after[:, :, None] == drafts[:, None, :]).sum(dim=-1)
        flat[places] = penalised(before, self._counted(rows, after) + more, rows)

    def _counted(self, rows: PenaltyRows, tokens: Tensor) -> Tensor:
        """How often the rows' outputs have ``tokens`` [S, W]: [S, W]."""
        return self.counts.view(-1)[flat_index(tokens, rows.seats, self._vocab)]

    def append(self, rows: PenaltyRows, positions: Tensor, drawn: Tensor) -> None:
        """The rows have drawn a token each: positions, drawn [R] int64, for all of the logits."""
        tokens = drawn[rows.at]
        self.tokens[rows.seats, positions[rows.at]] = tokens
        self.counts.view(-1)[rows.seats * self._vocab + tokens] += 1  # every row is there once

    def extend(self, rows: PenaltyRows, positions: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """The sequences have got ``counts`` [B] int64 tokens each, the first at ``positions`` [B];
        tokens: [B, D] int64, beyond these the last of them again."""
        own, drawn = counts[rows.at, None], tokens[rows.at]  # [S, 1], [S, D]
        step = torch.arange(drawn.shape[1], device=drawn.device)
        at = positions[rows.at, None] + torch.minimum(step, own - 1)
        self.tokens[rows.seats[:, None], at] = drawn
        index = flat_index(drawn, rows.seats, self._vocab).flatten()
        self.counts.view(-1).index_add_(0, index, (step < own).to(torch.int32).flatten())
