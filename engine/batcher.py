"""From a step plan to the packed batch. What does not change between steps is kept."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.batch import Batch, Chunk, DecodeGroup, chunk_mask, decode_groups
from engine.scheduler import StepPlan
from engine.sequence import Sequence, blocks_for
from engine.state import RowState
from protocol.blocks import BLOCK_TOKENS


def slots_of(pages: Tensor, positions: Tensor) -> Tensor:
    """Pool slots of ``positions`` that lie on ``pages``, elementwise."""
    return pages * BLOCK_TOKENS + positions % BLOCK_TOKENS


class Batcher:
    """Builds batches over one RowState.

    While the same sequences decode on the same pages, a step only moves on by one token: state
    rows, page lists and masks are those of the step before.
    """

    def __init__(self, state: RowState, dtype: torch.dtype) -> None:
        self._state = state
        self._like = torch.empty(0, dtype=dtype, device=state.device)
        self._handles: list[int] = []
        self._rows = torch.empty(0, dtype=torch.int64, device=state.device)  # [R] state rows
        self._table = torch.empty(0)  # [R, max_pages]
        self._groups: tuple[DecodeGroup, ...] = ()

    def build(self, plan: StepPlan) -> tuple[Batch, Tensor]:
        """The batch, and the state rows of those that draw a token, in the order of the logits."""
        tokens, positions, slots = [], [], []
        if plan.decode:
            lengths = self._decode(plan.decode)
            at = lengths - 1
            tokens.append(self._state.last_token[self._rows])
            positions.append(at)
            page = self._table.gather(1, (at // BLOCK_TOKENS)[:, None])[:, 0]
            slots.append(slots_of(page, at))
        start = len(plan.decode)
        logit_rows, drawing, chunks = list(range(start)), [], []
        for sequence, count in plan.chunks:
            self._state.seat(sequence)
            first, end = sequence.computed, sequence.computed + count
            at = torch.arange(first, end, device=self._state.device)
            tokens.append(torch.tensor(sequence.tokens[first:end], device=self._state.device))
            positions.append(at)
            slots.append(slots_of(self._state.block_table[sequence.row][at // BLOCK_TOKENS], at))
            chunks.append(self._chunk(sequence, start, count))
            start += count
            if end == len(sequence.tokens):
                logit_rows.append(start - 1)
                drawing.append(sequence.row)
        batch = Batch(
            tokens=_join(tokens),
            positions=_join(positions),
            slots=_join(slots),
            decode_rows=len(plan.decode),
            groups=self._groups if plan.decode else (),
            chunks=tuple(chunks),
            logit_rows=None if len(logit_rows) == start else self._tensor(logit_rows),
        )
        decoding = self._rows if plan.decode else self._rows[:0]
        return batch, _join([decoding, self._tensor(drawing)]) if drawing else decoding

    def _decode(self, decode: Seq[Sequence]) -> Tensor:
        """Bring the kept rows and groups up to date; the lengths of the decode rows."""
        handles = [s.handle for s in decode]
        same = handles == self._handles and all(s.seated_pages == len(s.pages) for s in decode)
        if not same:
            for sequence in decode:
                self._state.seat(sequence)
            self._handles = handles
            self._rows = self._tensor([s.row for s in decode])
            self._table = self._state.block_table[self._rows]
        lengths = self._state.length[self._rows]
        if same:
            for group in self._groups:
                group.grow(lengths)
        else:
            self._groups = decode_groups(self._table, lengths, self._like.dtype)
        return lengths

    def _chunk(self, sequence: Sequence, start: int, count: int) -> Chunk:
        context = sequence.computed
        if context == 0:
            return Chunk(start, count, 0, None, None)
        pages = self._state.block_table[sequence.row][: blocks_for(context + count)]
        return Chunk(start, count, context, pages, chunk_mask(context, count, self._like))

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._state.device)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
