"""Sample a step's tokens from its logits. ``engine.execution.verifier`` is the only caller.

    logprobs -> bias -> penalties -> grammar -> bans -> greedy: argmax
                                                     -> / temperature -> filters -> + noise: argmax

The order is vLLM's, except for grammar and bans: after the grammar, a ban can leave a token to draw
where the grammar allows banned tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling.filters import sample_filtered, sample_unfiltered
from engine.sampling.logprobs import compute_logprobs, gather_logprob_inputs
from engine.sampling.penalties import TokenHistory, add_logit_bias_, ban_tokens_
from engine.sampling.sampling_metadata import RandomRows, SamplingMetadata, build_sampling_metadata
from engine.sampling.sampling_table import SamplingTable
from engine.scheduling.sequence import Sequence as Running
from engine.structured_output.masks import ForbiddenTokens, mask_forbidden_
from protocol.requests import Logprobs


@dataclass(frozen=True)
class DraftRows:
    """The rows of a verification, packed by sequence: the row of its last token, then the rows of
    its draft tokens."""

    owner: Tensor  # [R] int64, index into ``drawing`` of each row
    depth: Tensor  # [R] int64, 0 for the row of the last token
    ancestors: Tensor  # [R, D] int64, draft tokens from the root down to the row, padded with -1


class Sampler:
    """Samples for the rows of one table; keeps the metadata while the same rows draw."""

    def __init__(self, table: SamplingTable) -> None:
        self._table = table
        self._drawing: list[Running] = []
        self._row_numbers: list[int] = []
        self._rows: Tensor | None = None
        self._metadata: SamplingMetadata | None = None
        self._penalized: list[Running] = []  # those of ``_drawing`` with penalties

    def __call__(
        self,
        drawing: list[Running],
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        forbidden: ForbiddenTokens | None = None,
    ) -> tuple[Tensor, list[Logprobs | None]]:
        """Draw one token for each of ``drawing``: [R] int64, and the log-probabilities that their
        requests want; an empty list if none does.

        logits: [R, vocab] fp32, changed here. rows: [R] int64, rows of the table. positions: [R]
        int64, the index of the token to draw.
        """
        metadata = self._metadata_of(drawing, rows)
        drawn = self._sample(metadata, logits, positions, forbidden)
        if metadata.penalties is not None and self._table.history is not None:
            self._table.history.append(metadata.penalties, positions, drawn[0])
        return drawn

    def verify(
        self,
        drawing: list[Running],
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        nodes: DraftRows,
        forbidden: ForbiddenTokens | None = None,
    ) -> tuple[Tensor, list[Logprobs | None]]:
        """Draw the token that follows each row of a verification: [R] int64, and the
        log-probabilities. The caller passes the tokens that it accepts to ``append``.

        logits: [R, vocab] fp32, changed here. rows: [B] int64, rows of the table. positions: [R]
        int64, the index of the token that a row draws.
        """
        metadata = self._metadata_of(drawing, rows).expand(nodes.owner)
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
    ) -> tuple[Tensor, list[Logprobs | None]]:
        wanted = metadata.logprobs
        inputs = None if wanted is None else gather_logprob_inputs(logits, wanted)
        longest = max((len(s.tokens) for s in self._penalized), default=0)
        apply_logits_processors_(
            logits, metadata, positions, self._table.history, longest, forbidden, ancestors
        )
        tokens = sample_tokens(logits, metadata, positions)
        if inputs is None:
            return tokens, []
        return tokens, _by_row(metadata, compute_logprobs(inputs, tokens))

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
    """Apply bias, penalties, grammars and bans in place to logits [R, vocab] fp32, contiguous.

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
    if metadata.bans is not None:
        ban_tokens_(logits, metadata.bans, positions, keep_last=forbidden is not None)


def sample_tokens(logits: Tensor, metadata: SamplingMetadata, positions: Tensor) -> Tensor:
    """Draw tokens [R] int64 from processed logits [R, vocab] fp32: a function of each row alone.

    positions: [R] int64, the index of the token to draw.
    """
    # On the CPU, max takes a third of argmax's time.
    tokens = logits.max(dim=-1).indices if metadata.any_greedy else torch.empty_like(positions)
    for rows in metadata.random:
        drawn = _sample_random(logits if rows.at is None else logits[rows.at], rows, positions)
        if rows.at is None:
            return drawn
        tokens[rows.at] = drawn
    return tokens


def _sample_random(logits: Tensor, rows: RandomRows, positions: Tensor) -> Tensor:
    if rows.filters is None:
        return sample_unfiltered(logits, rows.noise(positions))
    return sample_filtered(logits, rows.noise(positions), rows.filters)


def _by_row(metadata: SamplingMetadata, logprobs: Sequence[Logprobs]) -> list[Logprobs | None]:
    """One element per row of the logits; None for the rows without log-probabilities."""
    assert metadata.logprobs is not None
    out: list[Logprobs | None] = [None] * metadata.rows
    for row, each in zip(metadata.logprobs.places, logprobs, strict=True):
        out[row] = each
    return out
