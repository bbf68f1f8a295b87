"""Decode steps recorded as CUDA graphs: one launch for all kernels of a step.

    recorded   inputs from the state of the sequences -> the model -> logits
               without drafts also: the draw -> the state
    replayed   in a graph made for at least as many sequences, rows and pieces

A graph reads the same memory in every replay, so what changes between steps is written there first:
which sequences decode, and their drafts. A graph has a fixed number of sequences; those beyond the
step's have no rows. Graphs are recorded before the engine is ready, and share one memory pool,
because they run one after the other. The engine's stepper owns this object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.batching.attention_metadata import PackedBatch
from engine.batching.batcher import RowState
from engine.batching.draft_layout import DraftLayout, DraftShape, IntArray
from engine.execution.device_verifier import DeviceVerifier
from engine.kernels.paged_rows import PagedAttention, PagedRows, PieceList, piece_count
from engine.kernels.recording import (
    MOST_DRAFTED_ROWS,
    GraphSize,
    GraphSizes,
    Recording,
    make_recorder,
    recording_session,
)
from engine.kernels.sampling import DrawRows
from engine.kernels.step_inputs import StepInputs, fill_step_inputs
from engine.kv_cache.kv_pool import KVPool
from engine.model.decoder import DecoderModel
from engine.scheduling.sequence import Sequence as Running
from engine.uploads import upload
from protocol.block_keys import BLOCK_TOKENS

ROWS = (1, 2, 4, 8, 16)
"""Rows of each sequence; those above 1 are for drafts."""


@dataclass(frozen=True)
class GraphOutput:
    """The results of a graph, in memory that the next step overwrites. All graphs share it: tensors
    of their own would keep their memory, and every graph has hundreds of megabytes of them."""

    hidden: Tensor  # [sequences * rows, hidden], the last layer's output
    logits: Tensor  # [sequences * rows, vocab] fp32
    taps: list[Tensor]  # [sequences * rows, hidden] each
    rows: PagedRows
    inputs: StepInputs
    drafts: Tensor  # [sequences * (rows - 1)] int64, tokens of draft nodes


class _GraphRows:
    """The memory from which all graphs with ``rows`` rows a sequence read."""

    def __init__(self, rows: int, sequences: int, state: RowState) -> None:
        device = state.device
        self.rows, self.sequences, self._state = rows, sequences, state
        count = sequences * rows
        # What the host writes: the state row and the number of rows of each sequence, then the
        # depth of each row and its bits.
        self._written = torch.zeros(2 * (sequences + count), dtype=torch.int64, device=device)
        self.state_row, self.row_count, self.depth, self.bits = self._written.split(
            [sequences, sequences, count, count]
        )
        self.drafts = torch.zeros(max(1, count - sequences), dtype=torch.int64, device=device)
        self.order = torch.arange(count, device=device)
        self.known = torch.zeros(sequences, dtype=torch.int64, device=device)
        self.inputs = torch.zeros(3, count, dtype=torch.int64, device=device)
        self._leases: list[int] = []
        self._shape: DraftShape | None = None

    def write(self, decode: Sequence[Running], layout: DraftLayout | None) -> None:
        """Let the graphs compute ``decode``, with the drafts of ``layout``."""
        leases = [s.row_lease for s in decode]
        shape = None if layout is None else layout.shape
        if leases != self._leases or shape is not self._shape:
            self._leases, self._shape = leases, shape
            self._written.copy_(upload(self._numbers(decode, shape), self._state.device))
        if layout is not None:
            at = layout.shape.padded_nodes(self.rows)
            self.drafts.index_copy_(0, at, layout.tokens)

    def _numbers(self, decode: Sequence[Running], shape: DraftShape | None) -> IntArray:
        sequences, rows = self.sequences, self.rows
        numbers = np.zeros(len(self._written), dtype=np.int64)
        numbers[: len(decode)] = [s.row for s in decode]
        numbers[len(decode) : sequences] = len(self._state.length) - 1
        counts = numbers[sequences : 2 * sequences]
        depth, bits = numbers[2 * sequences :].reshape(2, sequences, rows)
        bits[:, 0] = 1
        if shape is None:
            counts[: len(decode)] = 1
            return numbers
        counts[: len(decode)] = shape.row_counts
        depth[shape.owner, shape.offset] = shape.depth
        bits[shape.owner, shape.offset] = shape.ancestor_bits
        return numbers

    def paged(self, size: GraphSize, pieces: PieceList) -> PagedRows:
        """Return the rows of a graph of this size."""
        s, count = size.sequences, size.sequences * size.rows
        first_row = self.order[:s] * size.rows
        return PagedRows(
            table=self._state.block_table,
            state_row=self.state_row[:s],
            known=self.known[:s],
            first_row=first_row,
            first_node=first_row - self.order[:s],
            row_count=self.row_count[:s],
            depth=self.depth[:count],
            ancestors=self.bits[:count],
            owner=self.order[:count] // size.rows,
            pieces=pieces,
            most_rows=size.rows,
        )


class DecodeGraphs:
    """The graphs of one engine. With ``batch_invariant`` every step runs in a graph with the most
    sequences, so that its products have the same number of rows and a row the same bits."""

    def __init__(
        self,
        model: DecoderModel,
        pool: KVPool,
        state: RowState,
        draw: DeviceVerifier,
        taps: Sequence[int] = (),
        *,
        batch_invariant: bool = False,
    ) -> None:
        self._model, self._pool, self._state, self._draw = model, pool, state, draw
        self.recorder = make_recorder(state.device)
        self._taps = tuple(taps)
        self._invariant = batch_invariant
        self._most = most = len(state.length) - 1
        c, longest = model.config, piece_count(state.block_table.shape[1] * BLOCK_TOKENS)
        self._sizes = GraphSizes(most, longest, 4 * c.heads * c.head_dim)
        self._rows: dict[int, _GraphRows] = {}
        self._graphs: dict[GraphSize, tuple[GraphOutput, Recording]] = {}
        rows = max(most, MOST_DRAFTED_ROWS)
        like = model.weights.embedding
        self._pieces = PieceList.empty(self._sizes.most_pieces, most, state.device)
        self._logits = like.new_empty((rows, c.vocab_size), dtype=torch.float32)
        self._hidden = like.new_empty((1 + len(self._taps), rows, c.hidden_size))

    def record(
        self, rows: Sequence[int] = (1,), progress: Callable[[float], None] = lambda _: None
    ) -> None:
        """Record all graphs with these ``rows`` a sequence. No sequence may be running."""
        sizes = self._sizes.of_rows(rows)
        with recording_session(self._state.device):
            for done, size in enumerate(sizes):
                progress(done / len(sizes))
                self._graphs[size] = self._record(size)
        self._sizes.add(sizes)
        self._draw_once()

    @torch.inference_mode()
    def _draw_once(self) -> None:
        """Compile the draws that are not part of a graph, by drawing for no sequence."""
        self._draw.warm_up(self._logits[:1])
        drafted = {size.rows: size for size in self._graphs if size.rows > 1}
        for size in drafted.values():
            out = self.run(size, (), None)
            self._draw.verify(out.logits, out.rows, out.inputs.positions, out.drafts, 0)

    def _record(self, size: GraphSize) -> tuple[GraphOutput, Recording]:
        if size.rows not in self._rows:
            drafted = min(self._most, MOST_DRAFTED_ROWS // size.rows)
            sequences = self._most if size.rows == 1 else drafted
            self._rows[size.rows] = _GraphRows(size.rows, sequences, self._state)
        source = self._rows[size.rows]
        whole = self._pieces
        pieces = PieceList(whole.items[: size.pieces], whole.starts, whole.total)
        rows = source.paged(size, pieces)
        count = len(rows.owner)
        inputs = StepInputs(*(numbers[:count] for numbers in source.inputs))
        hidden, *taps = self._hidden[:, :count]
        output = GraphOutput(hidden, self._logits[:count], taps, rows, inputs, source.drafts)
        return output, self.recorder(lambda: self._compute(output))

    @torch.inference_mode()
    def _compute(self, out: GraphOutput) -> None:
        state, rows, inputs = self._state, out.rows, out.inputs
        fill_step_inputs(rows, state.length, state.last_token, out.drafts, inputs, padded=True)
        paged = PagedAttention(len(rows.owner), rows, ())
        batch = PackedBatch(inputs.tokens, inputs.positions, inputs.slots, {}, None, paged)
        taps: dict[int, Tensor | None] = dict.fromkeys(self._taps)
        out.hidden.copy_(self._model.hidden(batch, self._pool, taps))
        for kept, tap in zip(out.taps, taps.values(), strict=True):
            assert tap is not None
            kept.copy_(tap)
        self._model.logits(out.hidden, out.logits)
        if rows.most_rows == 1:
            self._draw.advance(out.logits, DrawRows(rows.state_row, rows.row_count))

    def size_for(
        self, decode: Sequence[Running], layout: DraftLayout | None, ahead: int = 0
    ) -> GraphSize | None:
        """Return the smallest recorded graph that can compute a step of sequences that will have
        ``ahead`` more tokens than now; None: there is none."""
        nodes = [0] * len(decode) if layout is None else layout.shape.counts
        keys = (len(s.tokens) + ahead + n for s, n in zip(decode, nodes, strict=True))
        pieces = sum(map(piece_count, keys))
        most = 1 if layout is None else 1 + max(nodes)
        rows = next((n for n in self._sizes.rows if n >= most and (n == 1) == (layout is None)), 0)
        return self._sizes.find(rows, len(decode), pieces, widest=self._invariant)

    def rows_computed(self, sequences: int, drafts: int, kv_tokens: int) -> int:
        """Return the rows that a step of ``sequences`` with up to ``drafts`` each computes, whose
        contexts have ``kv_tokens`` in all."""
        # The last piece of a context may be a part of one.
        pieces = sequences + piece_count(kv_tokens + sequences * drafts)
        return self._sizes.rows_computed(sequences, drafts, pieces, widest=self._invariant)

    def run_empty(self, rows: int) -> bool:
        """Run the smallest graph with at least ``rows`` rows without any sequence, to measure how
        long it takes; return whether there is one."""
        fitting = [size for size in self._graphs if size.rows * size.sequences >= rows]
        if not fitting:
            return False
        self.run(min(fitting, key=lambda size: (size.rows * size.sequences, size)), (), None)
        return True

    def run(
        self, size: GraphSize, decode: Sequence[Running], layout: DraftLayout | None
    ) -> GraphOutput:
        """Compute a step of ``decode`` in the graph of this size."""
        self._state.seat(decode)
        self._rows[size.rows].write(decode, layout)
        output, recording = self._graphs[size]
        recording.replay()
        return output
