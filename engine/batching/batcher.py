"""The batcher: packs the rows of a step plan into one batch, and keeps what the next step reuses.

The stepper calls ``build`` once per step. While the same sequences decode on the same pages, a step
only advances by one token: row indices, page lists and masks are reused.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from engine.batching.attention_metadata import (
    AttentionMetadata,
    DecodeGroup,
    PackedBatch,
    PromptChunk,
    advance_group_,
    chunk_attention,
    decode_groups,
    verify_groups,
)
from engine.batching.draft_layout import DraftLayout
from engine.model_config.config import ModelConfig
from engine.sampling.sampling_table import SamplingTable
from engine.scheduling.sequence import Sequence, blocks_for
from engine.scheduling.step_policy import StepPlan
from engine.uploads import upload
from protocol.block_keys import BLOCK_TOKENS


class RowState:
    """The tables of one engine. A row belongs to a sequence from its admission until the scheduler
    frees the row. The batcher, the verifier and the proposers read and update the tables."""

    def __init__(self, rows: int, max_pages: int, sampling: SamplingTable) -> None:
        self.device = device = sampling.device
        self.sampling = sampling
        self.block_table = torch.zeros(  # [rows, max_pages] page ids
            (rows, max_pages), dtype=torch.int64, device=device
        )
        # [rows] tokens known; the KV of all but the last is in the pool
        self.length = torch.zeros(rows, dtype=torch.int64, device=device)
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)  # [rows]

    def seat(self, sequences: Seq[Sequence]) -> None:
        """Update the rows of ``sequences``: all of it for a new sequence, else its new pages."""
        fresh = [s for s in sequences if s.row_pages < 0]
        for sequence in fresh:
            self.sampling.set_row(sequence)
            sequence.row_pages = 0
        if fresh:
            parts = [[s.row, len(s.tokens), s.tokens[-1]] for s in fresh]
            rows, lengths, last = upload(np.array(parts, dtype=np.int64).T, self.device).unbind()
            self.length.index_copy_(0, rows, lengths)
            self.last_token.index_copy_(0, rows, last)
        self._write_pages([s for s in sequences if s.row_pages < len(s.pages)])

    def _write_pages(self, sequences: Seq[Sequence]) -> None:
        """Write the pages of ``sequences`` that their rows do not have yet."""
        if not sequences:
            return
        width = self.block_table.shape[1]
        at = [s.row * width + i for s in sequences for i in range(s.row_pages, len(s.pages))]
        pages = [page for s in sequences for page in s.pages[s.row_pages :]]
        places, ids = upload(np.array([at, pages], dtype=np.int64), self.device).unbind()
        self.block_table.view(-1).index_copy_(0, places, ids)
        for sequence in sequences:
            sequence.row_pages = len(sequence.pages)


def kv_slots(pages: Tensor, positions: Tensor) -> Tensor:
    """Return the pool slots [n] of ``positions`` [n], each on its page ``pages`` [n]."""
    return pages * BLOCK_TOKENS + positions % BLOCK_TOKENS


class Batcher:
    """Builds the batches of one engine over its RowState, with attention metadata per window."""

    def __init__(self, state: RowState, dtype: torch.dtype, config: ModelConfig) -> None:
        self._state = state
        self._windows = sorted(set(config.windows))
        self._shared = config.heads // config.kv_heads
        self._like = torch.empty(0, dtype=dtype, device=state.device)
        # The decode rows of the last step, R of them:
        self._leases: list[int] = []  # [R] row leases; empty: reuse nothing
        self._blocks: list[int] = []  # [R] blocks of the tokens
        self._rows = torch.empty(0, dtype=torch.int64, device=state.device)  # [R] state rows
        self._table = torch.empty(0)  # [R, max_pages]
        self._groups: dict[int, tuple[DecodeGroup, ...]] = {}  # by window

    def build(
        self, plan: StepPlan, layout: DraftLayout | None = None
    ) -> tuple[PackedBatch, Tensor]:
        """Return the batch, and the state rows [sequences] of the sequences that draw a token, in
        the order of the logits. With a ``layout`` of drafts, decoding sequences draw a token for
        each of their rows."""
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        if plan.decode:
            parts.append(
                self._decode(plan.decode) if layout is None else self._verify(plan.decode, layout)
            )
        decode_rows = start = len(parts[0][0]) if parts else 0
        logit_rows, drawing, starts = list(range(start)), [], []
        for sequence, count in plan.chunks:
            parts.append(self._chunk(sequence, count))
            starts.append(start)
            start += count
            if sequence.remaining == count:
                logit_rows.append(start - 1)
                drawing.append(sequence.row)
        tokens, positions, slots = (_concat(column) for column in zip(*parts, strict=True))
        batch = PackedBatch(
            tokens=tokens,
            positions=positions,
            slots=slots,
            attention=self._attention(plan, decode_rows, starts),
            logit_rows=None if len(logit_rows) == start else self._tensor(logit_rows),
        )
        decoding = self._rows if plan.decode else self._rows[:0]
        return batch, _concat([decoding, self._tensor(drawing)]) if drawing else decoding

    def _chunk(self, sequence: Sequence, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, positions and slots [count] of a prompt chunk."""
        self._state.seat((sequence,))
        first, end = sequence.computed, sequence.computed + count
        at = torch.arange(first, end, device=self._state.device)
        tokens = torch.tensor(sequence.tokens[first:end], device=self._state.device)
        return tokens, at, kv_slots(self._state.block_table[sequence.row][at // BLOCK_TOKENS], at)

    def _decode(self, decode: Seq[Sequence]) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, positions and slots [R] of decode rows without drafts."""
        at = self._advance(decode) - 1
        page = self._table.gather(1, (at // BLOCK_TOKENS)[:, None])[:, 0]
        return self._state.last_token[self._rows], at, kv_slots(page, at)

    def _verify(self, decode: Seq[Sequence], layout: DraftLayout) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, positions and slots [R] of decode rows with drafts."""
        for sequence in decode:
            if sequence.row_pages != len(sequence.pages):
                self._state.seat((sequence,))
        self._leases = []  # a later plain step cannot continue from here
        self._rows = self._tensor([s.row for s in decode])  # [B]
        table = self._state.block_table.index_select(0, self._rows)  # [B, max_pages]
        shape, state = layout.shape, self._state
        last = state.last_token.index_select(0, self._rows)  # [B]
        tokens = torch.cat([last, layout.tokens]).index_select(0, shape.device_order)  # [R]
        before = state.length.index_select(0, self._rows).sub_(1)  # [B]
        before = before.index_select(0, shape.device_owner)  # [R]
        slot = before + shape.device_offset
        at = slot if shape.is_chain else before + shape.device_depth
        page = table[shape.device_owner, slot // BLOCK_TOKENS]
        for window in self._windows:
            self._groups[window] = verify_groups(
                table, layout, window, self._like.dtype, self._shared
            )
        return tokens, at, kv_slots(page, slot)

    def _advance(self, decode: Seq[Sequence]) -> Tensor:
        """Update the kept rows and groups, and return the lengths [R] of the decode rows."""
        leases = [s.row_lease for s in decode]  # handles would miss a preemption in between
        blocks = [blocks_for(len(s.tokens)) for s in decode]  # ``pages`` may include draft pages
        same = leases == self._leases and blocks == self._blocks
        same = same and all(s.row_pages == len(s.pages) for s in decode)
        if not same:
            self._state.seat(decode)
            self._leases, self._blocks = leases, blocks
            self._rows = self._tensor([s.row for s in decode])
            self._table = self._state.block_table[self._rows]
        lengths = self._state.length[self._rows]
        for window in self._windows:
            if same:
                for group in self._groups[window]:
                    advance_group_(group, lengths, window)
            else:
                dtype = self._like.dtype
                self._groups[window] = decode_groups(self._table, lengths, window, dtype)
        return lengths

    def _attention(
        self, plan: StepPlan, decode_rows: int, starts: Seq[int]
    ) -> dict[int, AttentionMetadata]:
        return {
            window: AttentionMetadata(
                decode_rows,
                self._groups[window] if plan.decode else (),
                self._chunks(window, plan, starts),
            )
            for window in self._windows
        }

    def _chunks(self, window: int, plan: StepPlan, starts: Seq[int]) -> tuple[PromptChunk, ...]:
        table = self._state.block_table
        return tuple(
            chunk_attention(table[s.row], start, s.computed, count, window, self._like)
            for (s, count), start in zip(plan.chunks, starts, strict=True)
        )

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._state.device)


def _concat(parts: Seq[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
