"""Draws and accepts tokens on the device, where rows need no more than a temperature.

    one row a sequence   draw -> the state -> tokens, read after an event
    with drafts          draw -> accept -> the state -> move KV -> tokens, read in one copy

Rows with filters, penalties, biases, allowed tokens or log-probabilities go through ``Verifier``,
whose tokens are the same function of the logits, and so do drafts of rows with a grammar. The
stepper of an engine with kernels owns one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batching.batcher import RowState
from engine.execution.verifier import DrawnOnDevice, DrawnTokens
from engine.kernels.drafts import AcceptedPaths, accept_drafts, move_accepted_kv
from engine.kernels.paged_rows import PagedRows
from engine.kernels.sampling import (
    DrawRows,
    DrawState,
    DrawWorkspace,
    GrammarBits,
    draw_tokens,
)
from engine.kv_cache.kv_pool import Fp8Pool, KVPool, WidePool
from engine.sampling.sampling_table import FLOAT_COLUMNS, INT_COLUMNS
from engine.scheduling.draft_pages import MAX_DRAFT_NODES
from engine.structured_output.masks import PendingMasks, bitmask_words
from engine.uploads import upload


@dataclass(frozen=True)
class TokensOnTheWay:
    """Tokens that are copied to the host. ``ready`` is None where they are there already."""

    tokens: Tensor  # [n] int64 in the host's memory
    ready: torch.cuda.Event | None

    def read(self) -> list[int]:
        """Wait for the tokens and return them [n]."""
        if self.ready is not None:
            self.ready.synchronize()
        numbers: list[int] = self.tokens.tolist()
        return numbers


class DeviceVerifier:
    """The draws of one engine that need no host."""

    def __init__(self, state: RowState, pool: KVPool) -> None:
        table = state.sampling
        rows = 2 * (len(state.length) + MAX_DRAFT_NODES)  # graphs pad to twice the rows at most
        self._state = state
        self._draw = DrawState(
            temperature=table.floats[:, FLOAT_COLUMNS.index("temperature")],
            keys=table.ints[:, INT_COLUMNS.index("noise_key")],
            length=state.length,
            last_token=state.last_token,
        )
        self._workspace = DrawWorkspace(rows, table.vocab, state.device)
        # Two buffers: a step may be launched before the tokens of the one before it are read.
        pinned = state.device.type == "cuda"
        self._host = torch.zeros((2, rows), dtype=torch.int64, pin_memory=pinned)
        self._turn = 0
        self._pool = _tensors(pool)
        self._grammar: GrammarBits | None = None  # made for the first request with a grammar

    def advance(self, logits: Tensor, rows: DrawRows) -> None:
        """Draw a token for each sequence, of which each has one row or none, and append it to its
        state. logits: [S, vocab] fp32."""
        draw_tokens(logits, rows, self._draw, self._workspace)

    def fetch(self, count: int) -> TokensOnTheWay:
        """Begin to copy the first ``count`` tokens of the last ``advance`` to the host."""
        self._turn = 1 - self._turn
        host = self._host[self._turn][:count]
        host.copy_(self._workspace.drawn[:count], non_blocking=True)
        if self._state.device.type != "cuda":
            return TokensOnTheWay(host, None)
        ready = torch.cuda.Event()
        ready.record()
        return TokensOnTheWay(host, ready)

    def draw_one_each(
        self, logits: Tensor, rows: Tensor, tokens: TokensOnTheWay | None
    ) -> tuple[list[DrawnTokens], DrawnOnDevice]:
        """Draw a token for each sequence and append it to its state, unless the step's graph has
        done so: then these are its ``tokens``. logits: [S, vocab] fp32; rows: [S] int64, rows of
        the RowState."""
        if tokens is None:
            self.advance(logits, DrawRows(rows))
            tokens = self.fetch(len(rows))
        host = tokens.read()
        on_device = DrawnOnDevice(self._workspace.drawn[: len(host)])
        return [DrawnTokens([token], [None]) for token in host], on_device

    def draw_masked(
        self, logits: Tensor, rows: Tensor, masks: PendingMasks, *, advanced: bool
    ) -> tuple[list[DrawnTokens], DrawnOnDevice]:
        """Draw a token for each sequence from those that the ``masks`` allow, and append it to its
        state. With ``advanced`` the state has a token of this step already, which is replaced.
        logits: [S, vocab] fp32; rows: [S] int64, rows of the RowState."""
        grammar = self._grammar_bits()
        masks.copy_to(grammar.bits, grammar.rows[: len(rows)])
        positions = None
        if advanced:
            positions = self._state.length.index_select(0, rows) - 2  # of the sequences' own tokens
        own = DrawRows(rows, positions=positions)
        tokens = draw_tokens(
            logits, own, self._draw, self._workspace, grammar=grammar, update=not advanced
        )
        if advanced:
            self._state.last_token.index_copy_(0, rows, tokens)
        return self.draw_one_each(logits, rows, self.fetch(len(rows)))

    def _grammar_bits(self) -> GrammarBits:
        if self._grammar is None:
            count, words = len(self._state.length), bitmask_words(self._state.sampling.vocab)
            size = (count, words)
            bits = torch.full(size, -1, dtype=torch.int32, device=self._state.device)
            self._grammar = GrammarBits(bits, torch.full_like(bits[:, 0], -1))
        return self._grammar

    def warm_up(self, logits: Tensor) -> None:
        """Compile the draws of single rows, by drawing from logits [1, vocab] for the state row
        that no sequence has."""
        rows = upload([len(self._state.length) - 1], logits.device)
        own, grammar = DrawRows(rows), self._grammar_bits()
        positions = torch.zeros_like(rows)
        self.advance(logits, own)
        with_masks = (self._draw, self._workspace)
        draw_tokens(logits, own, *with_masks, grammar=grammar)
        own = DrawRows(rows, positions=positions)
        draw_tokens(logits, own, *with_masks, grammar=grammar, update=False)

    def verify(
        self,
        logits: Tensor,
        rows: PagedRows,
        positions: Tensor,
        drafts: Tensor,
        sequences: int,
        *,
        places: bool = True,
    ) -> tuple[list[DrawnTokens], DrawnOnDevice]:
        """Draw a token for each row, accept the drafts that equal the draws, append the tokens to
        the state, and move the KV of accepted nodes to the slots of their positions. Return the
        tokens of the first ``sequences``.

        logits: [R, vocab] fp32. positions: [R] int64, of the rows' own tokens. drafts: tokens
        [nodes] int64. ``places``: the result tells the row of each token, for proposers.
        """
        own = DrawRows(rows.state_row, rows.row_count, rows.owner, positions)
        drawn = draw_tokens(logits, own, self._draw, self._workspace, update=False)
        accepted = AcceptedPaths(len(rows.state_row), rows.most_rows - 1, logits.device)
        state = self._state
        accept_drafts(drawn, rows, drafts, state.length, state.last_token, accepted)
        move_accepted_kv(self._pool, rows, accepted)
        return _accepted_tokens(accepted, rows, sequences, places)


def _accepted_tokens(
    accepted: AcceptedPaths, rows: PagedRows, sequences: int, places: bool
) -> tuple[list[DrawnTokens], DrawnOnDevice]:
    """Return the tokens of the first ``sequences``; this is the step's only wait for the device."""
    counts = accepted.counts[:sequences]
    paths, tokens = accepted.paths[:sequences], accepted.tokens[:sequences]
    host = torch.cat([counts[:, None], paths, tokens], dim=1).tolist()
    width = paths.shape[1]
    drawn = [
        DrawnTokens(
            tokens=row[1 + width : 1 + width + row[0]],
            logprobs=[None] * row[0],
            nodes=[place - 1 for place in row[2 : 1 + row[0]]],
        )
        for row in host
    ]
    if not places:
        return drawn, DrawnOnDevice(tokens)
    last = paths.amax(dim=1, keepdim=True)
    at = rows.first_row[:sequences, None] + torch.where(paths < 0, last, paths)
    return drawn, DrawnOnDevice(tokens, at, counts)


def _tensors(pool: KVPool) -> tuple[Tensor, ...]:
    if isinstance(pool, Fp8Pool):
        return pool.payload, pool.exponents
    assert isinstance(pool, WidePool)
    return (pool.tensor,)
