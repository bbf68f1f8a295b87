"""From a step plan to the packed batch. What does not change between steps is kept."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.batching.attention_metadata import chunk_reach, decode_groups, grow_, verify_groups
from engine.batching.batch import Batch, Chunk, DecodeGroup, View
from engine.batching.draft_layout import Layout
from engine.model_config.config import ModelConfig
from engine.sampling.sampling_table import SamplingTable
from engine.scheduling.scheduler import StepPlan
from engine.scheduling.sequence import Sequence, blocks_for
from protocol.block_keys import BLOCK_TOKENS

# MERGED engine.state
# Per-row state of running sequences as tensors, so that a step costs no Python per sequence.
#
# block_table  [rows, max_pages] int64    pages of the sequence in this row
# length       [rows] int64               tokens known (KV of all but the last is in the pool)
# last_token   [rows] int64
# sampling     see engine/sampling/sampling_table.py


class RowState:
    """The tables. A row belongs to a sequence from its admission until the scheduler frees it."""

    def __init__(self, rows: int, max_pages: int, sampling: SamplingTable) -> None:
        self.device = device = sampling.device
        self.sampling = sampling
        self.block_table = torch.zeros((rows, max_pages), dtype=torch.int64, device=device)
        self.length = torch.zeros(rows, dtype=torch.int64, device=device)
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)

    def seat(self, sequence: Sequence) -> None:
        """Bring the row of ``sequence`` up to date: all of it when it is new, else new pages."""
        row = sequence.row
        if sequence.seated_pages < 0:
            self.length[row] = len(sequence.tokens)
            self.last_token[row] = sequence.tokens[-1]
            self.sampling.seat(sequence)
            sequence.seated_pages = 0
        known = sequence.seated_pages
        if known < len(sequence.pages):
            fresh = torch.tensor(sequence.pages[known:], device=self.device)
            self.block_table[row, known : len(sequence.pages)] = fresh
            sequence.seated_pages = len(sequence.pages)


def slots_of(pages: Tensor, positions: Tensor) -> Tensor:
    """Pool slots of ``positions`` that lie on ``pages``, elementwise."""
    return pages * BLOCK_TOKENS + positions % BLOCK_TOKENS


class Batcher:
    """Builds batches over one RowState, with a view for each of the model's windows.

    While the same sequences decode on the same pages, a step only moves on by one token: state
    rows, page lists and masks are those of the step before.
    """

    def __init__(self, state: RowState, dtype: torch.dtype, config: ModelConfig) -> None:
        self._state = state
        self._windows = sorted(set(config.windows))
        self._shared = config.heads // config.kv_heads
        self._like = torch.empty(0, dtype=dtype, device=state.device)
        self._seatings: list[int] = []
        self._blocks: list[int] = []
        self._rows = torch.empty(0, dtype=torch.int64, device=state.device)  # [R] state rows
        self._table = torch.empty(0)  # [R, max_pages]
        self._groups: dict[int, tuple[DecodeGroup, ...]] = {}  # by window

    def build(self, plan: StepPlan, layout: Layout | None = None) -> tuple[Batch, Tensor]:
        """The batch, and the state rows of those that draw a token, in the order of the logits.
        With a ``layout`` of drafts the decoding ones draw from all their rows."""
        tokens, positions, slots = [], [], []
        start = 0
        if plan.decode:
            own, at, where = (
                self._decode(plan.decode) if layout is None else self._verify(plan.decode, layout)
            )
            tokens.append(own)
            positions.append(at)
            slots.append(where)
            start = len(own)
        decode_rows = start
        logit_rows, drawing, starts = list(range(start)), [], []
        for sequence, count in plan.chunks:
            self._state.seat(sequence)
            first, end = sequence.computed, sequence.computed + count
            at = torch.arange(first, end, device=self._state.device)
            tokens.append(torch.tensor(sequence.tokens[first:end], device=self._state.device))
            positions.append(at)
            slots.append(slots_of(self._state.block_table[sequence.row][at // BLOCK_TOKENS], at))
            starts.append(start)
            start += count
            if end == len(sequence.tokens):
                logit_rows.append(start - 1)
                drawing.append(sequence.row)
        views = {
            window: View(
                decode_rows,
                self._groups[window] if plan.decode else (),
                self._chunks(window, plan, starts),
            )
            for window in self._windows
        }
        batch = Batch(
            tokens=_join(tokens),
            positions=_join(positions),
            slots=_join(slots),
            views=views,
            logit_rows=None if len(logit_rows) == start else self._tensor(logit_rows),
        )
        decoding = self._rows if plan.decode else self._rows[:0]
        return batch, _join([decoding, self._tensor(drawing)]) if drawing else decoding

    def _decode(self, decode: Seq[Sequence]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, positions and slots of the decode rows."""
        at = self._grow(decode) - 1
        page = self._table.gather(1, (at // BLOCK_TOKENS)[:, None])[:, 0]
        return self._state.last_token[self._rows], at, slots_of(page, at)

    def _verify(self, decode: Seq[Sequence], layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """The same with drafts."""
        for sequence in decode:
            if sequence.seated_pages != len(sequence.pages):
                self._state.seat(sequence)
        self._seatings = []  # what a plain step would go on from is not kept up to date
        self._rows = self._tensor([s.row for s in decode])
        table = self._state.block_table.index_select(0, self._rows)
        shape, state = layout.shape, self._state
        last = state.last_token.index_select(0, self._rows)
        tokens = torch.cat([last, layout.tokens]).index_select(0, shape.order_there)
        before = state.length.index_select(0, self._rows).sub_(1).index_select(0, shape.owner_there)
        slot = before + shape.within_there
        at = slot if shape.chains else before + shape.depth_there
        page = table[shape.owner_there, slot // BLOCK_TOKENS]
        for window in self._windows:
            self._groups[window] = verify_groups(
                table, layout, window, self._like.dtype, self._shared
            )
        return tokens, at, slots_of(page, slot)

    def _grow(self, decode: Seq[Sequence]) -> Tensor:
        """Bring the kept rows and groups up to date; the lengths of the decode rows."""
        seatings = [s.seating for s in decode]  # not handles: one may have left and come back
        blocks = [blocks_for(len(s.tokens)) for s in decode]  # more pages may be there, for drafts
        same = seatings == self._seatings and blocks == self._blocks
        same = same and all(s.seated_pages == len(s.pages) for s in decode)
        if not same:
            for sequence in decode:
                self._state.seat(sequence)
            self._seatings, self._blocks = seatings, blocks
            self._rows = self._tensor([s.row for s in decode])
            self._table = self._state.block_table[self._rows]
        lengths = self._state.length[self._rows]
        for window in self._windows:
            if same:
                for group in self._groups[window]:
                    grow_(group, lengths, window)
            else:
                dtype = self._like.dtype
                self._groups[window] = decode_groups(self._table, lengths, window, dtype)
        return lengths

    def _chunks(self, window: int, plan: StepPlan, starts: Seq[int]) -> tuple[Chunk, ...]:
        return tuple(
            chunk_reach(
                self._state.block_table[s.row], start, s.computed, count, window, self._like
            )
            for (s, count), start in zip(plan.chunks, starts, strict=True)
        )

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._state.device)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
