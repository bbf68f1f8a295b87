"""Changes to single logits: logit bias, banned tokens, and penalties on tokens that already occur.

Each touches a few tokens of a row, for penalties those of its history: a step is one indexed
operation on [rows, such tokens], not on the vocabulary. Only ``allowed_token_ids`` touch all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.uploads import upload

IntArray = NDArray[np.int64]


def flat_index(tokens: Tensor, at: Tensor, vocab: int) -> Tensor:
    """Return the indexes into the flattened logits of ``tokens`` [S, W] in the rows ``at`` [S]:
    [S, W] int64."""
    return tokens + (at * vocab)[:, None]


@dataclass(frozen=True)
class LogitBiasRows:
    """Biases of the rows that have any, padded with bias 0 for token 0."""

    at: Tensor  # [S] int64, rows of the logits
    places: IntArray  # [S] the same, on the host
    tokens: Tensor  # [S, W] int64
    bias: Tensor  # [S, W] float32


def add_logit_bias_(logits: Tensor, rows: LogitBiasRows) -> None:
    """Add the biases to logits [R, vocab] in place."""
    index = flat_index(rows.tokens, rows.at, logits.shape[1])
    logits.view(-1).index_add_(0, index.flatten(), rows.bias.flatten())


@dataclass(frozen=True)
class BannedTokenRows:
    """Tokens that would end a text, of the rows that have fewer than ``min_tokens`` output tokens;
    padded with the first one."""

    at: Tensor  # [S] int64, rows of the logits
    places: IntArray  # [S] the same, on the host
    tokens: Tensor  # [S, W] int64
    min_length: Tensor  # [S] int64: banned while the sequence has fewer tokens


def ban_tokens_(
    logits: Tensor, rows: BannedTokenRows, positions: Tensor, keep_last: bool = False
) -> None:
    """Set the logits [R, vocab] of banned tokens to -inf, in place.

    positions: [R] int64, the index of the token to draw. ``keep_last``: a row whose only possible
    tokens are banned keeps them.
    """
    flat = logits.view(-1)
    index = flat_index(rows.tokens, rows.at, logits.shape[1])
    before = flat[index]  # [S, W]
    banned = (positions[rows.at] < rows.min_length)[:, None]
    flat[index] = before.masked_fill(banned, float("-inf"))
    if keep_last:
        possible = logits[rows.at].max(dim=-1, keepdim=True).values > float("-inf")  # [S, 1]
        flat[index] = before.masked_fill(banned & possible, float("-inf"))


@dataclass(frozen=True)
class AllowedTokenRows:
    """Tokens that must not be drawn, of the rows with ``allowed_token_ids``."""

    at: Tensor  # [S] int64, rows of the logits
    places: IntArray  # [S] the same, on the host
    forbidden: Tensor  # [S, vocab] bool
    ends: Tensor  # [S, E] int64, the model's end-of-text tokens


def keep_allowed_(logits: Tensor, rows: AllowedTokenRows, may_end: bool = False) -> None:
    """Set the logits [R, vocab] of tokens that are not allowed to -inf, in place.

    ``may_end``: a row without any possible token that is allowed keeps its end tokens, because a
    grammar whose text is complete allows nothing else.
    """
    before = logits[rows.at]  # [S, vocab]
    kept = before.masked_fill(rows.forbidden, float("-inf"))
    if may_end:
        possible = kept.max(dim=-1, keepdim=True).values > float("-inf")  # [S, 1]
        ended = torch.full_like(kept, float("-inf"))
        ended.scatter_(1, rows.ends, before.gather(1, rows.ends))
        kept = torch.where(possible, kept, ended)
    logits[rows.at] = kept


@dataclass(frozen=True)
class PenaltyRows:
    """Penalties of the rows that have any: [S]."""

    at: Tensor  # [S] int64, rows of the logits
    places: IntArray  # [S] the same, on the host
    history_rows: Tensor  # [S] int64, rows of the TokenHistory
    repetition: Tensor  # [S] float32; 1: off
    presence: Tensor  # [S] float32; 0: off
    frequency: Tensor  # [S] float32; 0: off


def penalized_logits(logits: Tensor, counts: Tensor, rows: PenaltyRows) -> Tensor:
    """Return logits [S, W] after penalties; counts: [S, W], occurrences of each in the output.

    The repetition penalty is for tokens of prompt and output alike; it divides positive logits and
    multiplies others (Keskar et al., CTRL, 2019, section 4.1, as in transformers). Presence and
    frequency are subtracted for tokens of the output only (OpenAI's API reference).
    """
    repetition = rows.repetition[:, None]
    out = torch.where(logits > 0, logits / repetition, logits * repetition)
    out -= rows.frequency[:, None] * counts
    out -= rows.presence[:, None] * (counts > 0)
    return out


class TokenHistory:
    """The tokens of each row and their counts in its output, for penalties. ``SamplingTable`` owns
    it and creates it for the first request with penalties."""

    def __init__(self, rows: int, length: int, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self.tokens = torch.zeros((rows, length), dtype=torch.int64, device=device)
        self.counts = torch.zeros((rows, vocab), dtype=torch.int32, device=device)

    def set_row(self, row: int, tokens: Sequence[int], prompt: int) -> None:
        """Give ``row`` to a sequence of ``tokens``; the first ``prompt`` of them are its prompt."""
        known = upload(tokens, self.tokens.device)
        self.tokens[row] = known[0]  # beyond its end, a row repeats a token that it has
        self.tokens[row, : len(tokens)] = known
        self.counts[row] = 0
        one = torch.ones(len(tokens) - prompt, dtype=torch.int32, device=known.device)
        self.counts[row].index_add_(0, known[prompt:], one)

    def penalize_(
        self, logits: Tensor, rows: PenaltyRows, longest: int, ancestors: Tensor | None = None
    ) -> None:
        """Apply penalties to logits [R, vocab] in place; no row has more than ``longest`` tokens.

        ancestors: [R, D] int64, draft tokens that follow a row's own, padded with -1; None: none. A
        token that occurs twice is written twice, with the same value.
        """
        tokens = self.tokens[rows.history_rows, :longest]  # [S, longest]
        flat = logits.view(-1)
        index = flat_index(tokens, rows.at, self._vocab)
        if ancestors is None:
            flat[index] = penalized_logits(flat[index], self._counts_of(rows, tokens), rows)
            return
        drafts = ancestors[rows.at]  # [S, D]
        # Padding is replaced by a token that the row has.
        after = torch.where(drafts < 0, tokens[:, :1], drafts)
        draft_index = flat_index(after, rows.at, self._vocab)
        before = flat[draft_index]
        flat[index] = penalized_logits(flat[index], self._counts_of(rows, tokens), rows)
        more = (after[:, :, None] == drafts[:, None, :]).sum(dim=-1)
        flat[draft_index] = penalized_logits(before, self._counts_of(rows, after) + more, rows)

    def _counts_of(self, rows: PenaltyRows, tokens: Tensor) -> Tensor:
        """How often the rows' outputs have ``tokens`` [S, W]: [S, W]."""
        return self.counts.view(-1)[flat_index(tokens, rows.history_rows, self._vocab)]

    def append(self, rows: PenaltyRows, positions: Tensor, drawn: Tensor) -> None:
        """Append one drawn token to each of ``rows``. positions, drawn: [R] int64, one element for
        each row of the logits."""
        tokens = drawn[rows.at]
        self.tokens[rows.history_rows, positions[rows.at]] = tokens
        self.counts.view(-1)[rows.history_rows * self._vocab + tokens] += 1  # each row occurs once

    def extend(self, rows: PenaltyRows, positions: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Append ``counts`` [B] int64 tokens to each sequence, the first at ``positions`` [B].

        tokens: [B, D] int64; beyond a sequence's count, its last token is repeated.
        """
        own, drawn = counts[rows.at, None], tokens[rows.at]  # [S, 1], [S, D]
        step = torch.arange(drawn.shape[1], device=drawn.device)
        at = positions[rows.at, None] + torch.minimum(step, own - 1)
        self.tokens[rows.history_rows[:, None], at] = drawn
        index = flat_index(drawn, rows.history_rows, self._vocab).flatten()
        self.counts.view(-1).index_add_(0, index, (step < own).to(torch.int32).flatten())
