"""The passes of a draft model on a GPU: kernels, recorded as CUDA graphs.

    begin      the host writes which tokens of each sequence lack KV
    pass 1     rows of these tokens        -> the draft model -> a draw after the last of them
    pass 2 ..  rows of the tokens just drawn -> the draft model -> a draw

The passes have a length and a last token of each sequence of their own, which a draw advances. So a
pass reads on the device what the one before has drawn, and each pass is one launch. A size that was
not recorded is computed by the same kernels without a graph. PagedDraftRunner creates this object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.batching.attention_metadata import PackedBatch
from engine.batching.batcher import RowState
from engine.batching.draft_layout import IntArray
from engine.kernels.paged_rows import PagedAttention, PagedRows, PieceList, piece_count
from engine.kernels.recording import (
    GraphSize,
    GraphSizes,
    Recording,
    make_recorder,
    recording_session,
)
from engine.kernels.sampling import DrawRows, DrawState, DrawWorkspace, draw_tokens
from engine.kernels.step_inputs import StepInputs, fill_step_inputs
from engine.kv_cache.kv_pool import KVPool
from engine.model.decoder import DecoderModel
from engine.sampling.sampling_table import FLOAT_COLUMNS, INT_COLUMNS
from engine.speculation.proposers.draft_runner import DraftRequest
from engine.uploads import upload
from protocol.block_keys import BLOCK_TOKENS

ROWS = (1, 2, 4)
"""Rows of each sequence in a pass. Up to as many tokens of a sequence may lack KV in pass 1."""


class _PassRows:
    """The memory from which all passes with ``rows`` rows a sequence read."""

    def __init__(self, rows: int, sequences: int, state: RowState) -> None:
        device, count = state.device, sequences * rows
        self._rows, self._sequences, self._state = rows, sequences, state
        # What the host writes: numbers of each sequence, then its texts' tokens without KV but the
        # first.
        self._written = torch.zeros(count + 3 * sequences, dtype=torch.int64, device=device)
        self.state_row, self.row_count, self.length, self.last_row, self.later = (
            self._written.split([*[sequences] * 4, count - sequences])
        )
        self._order = torch.arange(count, device=device)
        self._depth = self._order % rows
        self._bits = torch.full_like(self._depth, 2).bitwise_left_shift_(self._depth).sub_(1)
        self._known = torch.zeros(sequences, dtype=torch.int64, device=device)
        self.inputs = torch.zeros(3, count, dtype=torch.int64, device=device)
        self._leases: list[int] = []

    def write(self, requests: Sequence[DraftRequest], vocab: int) -> None:
        """Let the passes compute ``requests``, with tokens below ``vocab``."""
        leases = [r.sequence.row_lease for r in requests]
        # With one row, tokens and lengths come from the pass before.
        if self._rows > 1 or leases != self._leases:
            self._leases = leases
            self._written.copy_(upload(self._numbers(requests, vocab), self._written.device))

    def _numbers(self, requests: Sequence[DraftRequest], vocab: int) -> IntArray:
        count, rows = self._sequences, self._rows
        numbers = np.zeros(len(self._written), dtype=np.int64)
        state_row, row_count, length, last_row = numbers[: 4 * count].reshape(4, count)
        later = numbers[4 * count :].reshape(count, rows - 1)
        state_row[:] = len(self._state.length) - 1  # for the padding of graphs
        for i, r in enumerate(requests):
            text = r.sequence.tokens
            fresh = len(text) - r.known if rows > 1 else 1
            state_row[i], row_count[i], length[i] = r.sequence.row, fresh, len(text)
            last_row[i] = i * rows + fresh - 1
            later[i, : fresh - 1] = text[r.known + 1 : r.known + fresh]
        np.minimum(later, vocab - 1, out=later)
        return numbers

    def paged(self, sequences: int, pieces: PieceList) -> PagedRows:
        """Return the rows of the first ``sequences``."""
        count, order = sequences * self._rows, self._order[:sequences]
        first_row = order * self._rows
        return PagedRows(
            table=self._state.block_table,
            state_row=self.state_row[:sequences],
            known=self._known[:sequences],
            first_row=first_row,
            first_node=first_row - order,
            row_count=self.row_count[:sequences],
            depth=self._depth[:count],
            ancestors=self._bits[:count],
            owner=self._order[:count] // self._rows,
            pieces=pieces,
            most_rows=self._rows,
        )


class _Pass:
    """The computation of a pass and the memory of all passes. It is apart from DraftPasses because
    recordings refer to it: dropping the proposer frees the model at once."""

    def __init__(self, model: DecoderModel, pool: KVPool, state: RowState) -> None:
        self._model, self._pool = model, pool
        device, table = state.device, state.sampling
        most, vocab = len(state.length) - 1, model.config.vocab_size
        self.numbers = torch.zeros((2, len(state.length)), dtype=torch.int64, device=device)
        self.state = DrawState(
            temperature=table.floats[:, FLOAT_COLUMNS.index("temperature")],
            keys=table.ints[:, INT_COLUMNS.index("noise_key")],
            length=self.numbers[0],
            last_token=self.numbers[1],
        )
        self.workspace = DrawWorkspace(most, vocab, device)
        self.logits = torch.empty((most, vocab), device=device)
        self.rows = {rows: _PassRows(rows, most, state) for rows in ROWS}

    @torch.inference_mode()
    def __call__(self, rows: PagedRows) -> None:
        own, count, sequences = self.rows[rows.most_rows], len(rows.owner), len(rows.state_row)
        state = self.state
        inputs = StepInputs(*(numbers[:count] for numbers in own.inputs))
        fill_step_inputs(rows, state.length, state.last_token, own.later, inputs, padded=True)
        paged = PagedAttention(count, rows, ())
        batch = PackedBatch(inputs.tokens, inputs.positions, inputs.slots, {}, None, paged)
        hidden = self._model.hidden(batch, self._pool)
        if rows.most_rows > 1:
            state.length.index_copy_(0, rows.state_row, own.length[:sequences])
            hidden = hidden.index_select(0, own.last_row[:sequences])
        logits = self._model.logits(hidden, self.logits[:sequences])
        draw_tokens(logits, DrawRows(rows.state_row, rows.row_count), state, self.workspace)


class DraftPasses:
    """The passes of one draft model over the sequences of ``state``."""

    def __init__(self, model: DecoderModel, pool: KVPool, state: RowState) -> None:
        self._model, self._state = model, state
        self._compute = _Pass(model, pool, state)
        self.logits = self._compute.logits  # of the last pass
        self.length = self._compute.state.length  # [state rows] tokens, with those drawn
        c, most = model.config, len(state.length) - 1
        longest = piece_count(state.block_table.shape[1] * BLOCK_TOKENS)
        self._sizes = GraphSizes(most, longest, 4 * c.heads * c.head_dim)
        self._pieces = PieceList.empty(self._sizes.most_pieces, most, state.device)
        self._graphs: dict[GraphSize, Recording] = {}

    def record(self, progress: Callable[[float], None]) -> None:
        """Record passes of all sizes. No pass may have begun."""
        if not self._model.can_be_recorded:
            return
        recorder = make_recorder(self._state.device)
        sizes, whole = self._sizes.of_rows(ROWS), self._pieces
        with recording_session(self._state.device):
            for done, size in enumerate(sizes):
                progress(done / len(sizes))
                pieces = PieceList(whole.items[: size.pieces], whole.starts, whole.total)
                rows = self._compute.rows[size.rows].paged(size.sequences, pieces)
                self._graphs[size] = recorder(partial(self._compute, rows))
        self._sizes.add(sizes)

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Start a chain of passes for ``requests``."""
        known = [(r.sequence.row, r.known + 1, r.sequence.tokens[r.known]) for r in requests]
        numbers = np.array(known, dtype=np.int64).T
        np.minimum(numbers[2], self._model.config.vocab_size - 1, out=numbers[2])
        rows, *state = upload(numbers, self._compute.numbers.device).split([1, 2])
        self._compute.numbers.index_copy_(1, rows[0], state[0])

    def run(self, requests: Sequence[DraftRequest], place: int) -> Tensor:
        """Run pass ``place``, 0 for the first, of a chain for the first ``requests`` of those that
        it began with. Return the tokens drawn, [n] int64, in memory that the next pass overwrites.
        The filters of requests are not applied; the caller draws from ``logits`` [n, vocab] then,
        and calls ``redraw``."""
        fresh = 1 if place else max(len(r.sequence.tokens) - r.known for r in requests)
        rows = next(rows for rows in ROWS if rows >= fresh)
        self._compute.rows[rows].write(requests, self._model.config.vocab_size)
        pieces = sum(piece_count(len(r.sequence.tokens) + place) for r in requests)
        size = self._sizes.find(rows, len(requests), pieces)
        if size is None:
            own = PieceList.empty(pieces, len(requests), self._state.device)
            self._compute(self._compute.rows[rows].paged(len(requests), own))
        else:
            self._graphs[size].replay()
        return self._compute.workspace.drawn[: len(requests)]

    def redraw(self, rows: Tensor, tokens: Tensor) -> None:
        """Replace the tokens drawn by the last pass; rows, tokens: [n] int64, state rows first."""
        self._compute.state.last_token.index_copy_(0, rows, tokens)
