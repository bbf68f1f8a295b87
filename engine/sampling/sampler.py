"""Sample a step's tokens from its logits. ``engine.execution.verifier`` is the only caller.

    logprobs -> bias -> penalties -> grammar -> allowed -> bans
             -> greedy: argmax
             -> / temperature -> filters -> + noise: argmax

The order is vLLM's, except for what forbids tokens, which comes last: after the grammar, a ban can
leave a token to draw where the grammar allows banned tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling.filters import FilteredDraw, sample_unfiltered
from engine.sampling.logprobs import compute_logprobs, gather_logprob_inputs
from engine.sampling.penalties import (
    TokenHistory,
    add_logit_bias_,
    ban_tokens_,
    keep_allowed_,
)
from engine.sampling.sampling_metadata import (
    DraftRows,
    SamplingMetadata,
    build_sampling_metadata,
)
from engine.sampling.sampling_table import SamplingTable
from engine.scheduling.sequence import Sequence as Running
from engine.structured_output.masks import ForbiddenTokens, mask_forbidden_
from engine.uploads import read_back
from protocol.requests import Logprobs


class TokenDraw:
    """The tokens drawn for the rows of a step, before the host has read them."""

    def __init__(
        self,
        tokens: Tensor,
        filtered: FilteredDraw | None = None,
        filtered_at: Tensor | None = None,
    ) -> None:
        """filtered_at: [S] int64, rows of the ``filtered`` draw; None: all of them."""
        self.tokens = tokens
        """[R] int64. ``read`` makes them final; without filters they are from the start."""
        self._filtered = filtered
        self._filtered_at = filtered_at

    def read(self, more: Tensor | None = None) -> list[int]:
        """Wait for the device and return the tokens [R], then ``more`` [n] int64.

        It waits once, and again where filters allow more tokens than the most likely ones that were
        searched.
        """
        after = () if more is None else (more,)
        if self._filtered is None or self._filtered.short is None:
            host, *rest = read_back(self.tokens, *after)
        else:
            host, short, *rest = read_back(self.tokens, self._filtered.short, *after)
            if any(short):
                self._filtered.search_further([row for row, flag in enumerate(short) if flag])
                if self._filtered_at is not None:
                    self.tokens[self._filtered_at] = self._filtered.tokens
                (host,) = read_back(self.tokens)
        return host + rest[0] if rest else host


@dataclass(frozen=True)
class PendingDraw:
    """A step's draw, for the caller of ``Sampler`` to read once."""

    draw: TokenDraw
    finish: Callable[[Tensor], list[Logprobs | None]]

    @property
    def tokens(self) -> Tensor:
        """The tokens on the device [R] int64, after ``read``."""
        return self.draw.tokens

    def read(self, more: Tensor | None = None) -> tuple[list[int], list[Logprobs | None]]:
        """Return the tokens [R] followed by ``more`` [n] int64, and the log-probabilities that the
        requests want; an empty list if none does. These are read in a second wait."""
        host = self.draw.read(more)
        return host, self.finish(self.draw.tokens)


class Sampler:
    """Samples for the rows of one table; keeps the metadata while the same rows draw."""

    def __init__(self, table: SamplingTable) -> None:
        self._table = table
        self._drawing: list[Running] = []
        self._row_numbers: list[int] = []
        self._rows: Tensor | None = None
        self._metadata: SamplingMetadata | None = None
        self._plain_of: list[Running] = []
        self._plain = False
        self._penalized: list[Running] = []  # those of ``_drawing`` with penalties

    def is_plain(self, drawing: list[Running]) -> bool:
        """Return whether all of ``drawing`` are greedy or have a temperature and nothing else but
        perhaps a grammar."""
        if drawing != self._plain_of:
            self._plain_of = drawing
            self._plain = all(_is_plain(s) for s in drawing)
        return self._plain

    def __call__(
        self,
        drawing: list[Running],
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        forbidden: ForbiddenTokens | None = None,
    ) -> PendingDraw:
        """Draw one token for each of ``drawing``, [R]. The caller reads it before the next draw.

        logits: [R, vocab] fp32, changed here. rows: [R] int64, rows of the table. positions: [R]
        int64, the index of the token to draw.
        """
        metadata = self._metadata_of(drawing, rows)
        pending = self._sample(metadata, logits, positions, forbidden)
        penalties, history = metadata.penalties, self._table.history
        if penalties is None or history is None:
            return pending

        def append_and_finish(tokens: Tensor) -> list[Logprobs | None]:
            history.append(penalties, positions, tokens)
            return pending.finish(tokens)

        return PendingDraw(pending.draw, append_and_finish)

    def verify(
        self,
        drawing: list[Running],
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        nodes: DraftRows,
        forbidden: ForbiddenTokens | None = None,
    ) -> PendingDraw:
        """Draw the token that follows each row of a verification: [R]. The caller reads it, and
        passes the tokens that it accepts to ``append``.

        logits: [R, vocab] fp32, changed here. rows: [B] int64, rows of the table. positions: [R]
        int64, the index of the token that a row draws.
        """
        metadata = self._metadata_of(drawing, rows).expand(nodes)
        return self._sample(metadata, logits, positions, forbidden, nodes.ancestors)

    def append(
        self,
        drawing: list[Running],
        rows: Tensor,
        positions: Tensor,
        tokens: Tensor,
        counts: Tensor,
    ) -> None:
        """Record the tokens accepted after ``verify``.

        tokens: [B, D] int64; beyond a sequence's count, its last token is repeated. counts: [B]
        int64, at least 1. rows: [B] int64, rows of the table. positions: [B] int64, of the first
        token.
        """
        metadata = self._metadata_of(drawing, rows)
        if metadata.penalties is not None and self._table.history is not None:
            self._table.history.extend(metadata.penalties, positions, tokens, counts)

    def _sample(
        self,
        metadata: SamplingMetadata,
        logits: Tensor,
        positions: Tensor,
        forbidden: ForbiddenTokens | None,
        ancestors: Tensor | None = None,
    ) -> PendingDraw:
        wanted = metadata.logprobs
        inputs = None if wanted is None else gather_logprob_inputs(logits, wanted)
        longest = max((len(s.tokens) for s in self._penalized), default=0)
        apply_logits_processors_(
            logits, metadata, positions, self._table.history, longest, forbidden, ancestors
        )
        draw = sample_tokens(logits, metadata, positions)
        if inputs is None:
            return PendingDraw(draw, lambda _: [])
        return PendingDraw(draw, lambda tokens: _by_row(metadata, compute_logprobs(inputs, tokens)))

    def _metadata_of(self, drawing: list[Running], rows: Tensor) -> SamplingMetadata:
        """The metadata of these rows. Sequences compare by identity, so this costs no Python per
        sequence while nothing changes."""
        if self._metadata is not None and drawing == self._drawing:
            if rows is self._rows:
                return self._metadata
            if [s.row for s in drawing] == self._row_numbers:
                self._rows = rows
                return self._metadata
        self._drawing, self._rows = drawing, rows
        self._row_numbers = [s.row for s in drawing]
        self._penalized = [s for s in drawing if s.request.sampling.has_penalties]
        self._metadata = build_sampling_metadata(drawing, rows, self._table)
        return self._metadata


def apply_logits_processors_(
    logits: Tensor,
    metadata: SamplingMetadata,
    positions: Tensor,
    history: TokenHistory | None,
    longest: int,
    forbidden: ForbiddenTokens | None = None,
    ancestors: Tensor | None = None,
) -> None:
    """Apply bias, penalties, grammars, allowed tokens and bans in place to logits [R, vocab] fp32,
    contiguous.

    positions: [R] int64, the index of the token to draw. ``longest``: the most tokens of a sequence
    with penalties. ``forbidden``: tokens that the grammars of some rows exclude. ancestors: [R, D]
    int64, draft tokens that precede a row, padded with -1; None: none.
    """
    if metadata.bias is not None:
        add_logit_bias_(logits, metadata.bias)
    if metadata.penalties is not None:
        assert history is not None
        history.penalize_(logits, metadata.penalties, longest, ancestors)
    if forbidden is not None:
        mask_forbidden_(logits, forbidden)
    if metadata.allowed is not None:
        keep_allowed_(logits, metadata.allowed, may_end=forbidden is not None)
    if metadata.bans is not None:
        few = forbidden is not None or metadata.allowed is not None
        ban_tokens_(logits, metadata.bans, positions, keep_last=few)


def sample_tokens(logits: Tensor, metadata: SamplingMetadata, positions: Tensor) -> TokenDraw:
    """Draw tokens [R] from processed logits [R, vocab] fp32: a function of each row alone.

    positions: [R] int64, the index of the token to draw.
    """
    # On the CPU, max takes a third of argmax's time.
    tokens = logits.max(dim=-1).indices if metadata.any_greedy else torch.empty_like(positions)
    filtered: FilteredDraw | None = None
    filtered_at: Tensor | None = None
    for rows in metadata.random:
        own = logits if rows.at is None else logits[rows.at]
        noise = rows.noise(positions)
        if rows.filters is None:
            drawn = sample_unfiltered(own, noise)
        else:
            filtered, filtered_at = FilteredDraw(own, noise, rows.filters), rows.at
            drawn = filtered.tokens
        if rows.at is None:
            tokens = drawn
        else:
            tokens[rows.at] = drawn
    return TokenDraw(tokens, filtered, filtered_at)


def _by_row(metadata: SamplingMetadata, logprobs: Sequence[Logprobs]) -> list[Logprobs | None]:
    """One element per row of the logits; None for the rows without log-probabilities."""
    assert metadata.logprobs is not None
    out: list[Logprobs | None] = [None] * metadata.rows
    for row, each in zip(metadata.logprobs.places.tolist(), logprobs, strict=True):
        out[row] = each
    return out


def _is_plain(sequence: Running) -> bool:
    p = sequence.request.sampling
    more = p.has_penalties or p.logit_bias or p.min_tokens or p.allowed_token_ids
    return (p.is_greedy or not p.has_filters) and not more and p.logprobs is None
