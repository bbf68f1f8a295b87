"""The batcher for kernels: builds the batch of a step with everything on the device.

The stepper calls ``build`` once per step, as it calls ``Batcher.build`` on a CPU. Nothing here
waits for the device: what the host knows is uploaded in few copies, and the tokens and positions of
decode rows are read from the RowState by a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from engine.batching.attention_metadata import AttentionMetadata, PackedBatch, chunk_attention
from engine.batching.batcher import RowState
from engine.batching.draft_layout import DraftLayout, IntArray
from engine.batching.prompt_runs import pool_slots
from engine.kernels.paged_rows import (
    PagedAttention,
    PagedRows,
    PieceList,
    PromptRows,
    piece_count,
    rows_bound,
)
from engine.kernels.step_inputs import StepInputs, fill_step_inputs
from engine.model_config.config import ModelConfig
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_policy import StepPlan
from engine.uploads import upload, upload_parts

MOST_GATHERED_KEYS = 1 << 16
"""Keys whose KV is gathered at a time for chunks of several prompts: 256 MiB for a layer of
Llama-3-8B. A single prompt may have more."""


class PagedBatcher:
    """Builds the batches of one engine over its RowState. ``masks``: prompts attend by torch's
    general attention, which needs masks."""

    def __init__(
        self, state: RowState, dtype: torch.dtype, config: ModelConfig, *, masks: bool
    ) -> None:
        self._state = state
        self._windows = sorted(set(config.windows)) if masks else []
        self._like = torch.empty(0, dtype=dtype, device=state.device)
        self._leases: list[int] = []  # row leases of ``_rows``
        self._rows = torch.empty(0, dtype=torch.int64, device=state.device)
        most = len(state.length)
        # Without drafts every sequence has one row, with the number of the sequence.
        self._order = torch.arange(most, device=state.device)
        self._ones = torch.ones(most, dtype=torch.int64, device=state.device)
        self._zeros = torch.zeros(most, dtype=torch.int64, device=state.device)

    def build(
        self, plan: StepPlan, layout: DraftLayout | None = None
    ) -> tuple[PackedBatch, Tensor]:
        """Return the batch, and the state rows [sequences] of the sequences that draw a token, in
        the order of the logits. With a ``layout`` of drafts, decoding sequences draw a token for
        each of their rows."""
        self._state.seat([*plan.decode, *(sequence for sequence, _ in plan.chunks)])
        parts: list[StepInputs] = []
        decode: PagedRows | None = None
        rows = self._rows[:0]
        if plan.decode:
            rows = self._state_rows(plan.decode)
            decode, inputs = self.decode_rows(plan.decode, rows, layout)
            parts.append(inputs)
        decode_rows = len(parts[0].tokens) if parts else 0
        prompts: tuple[PromptRows, ...] = ()
        logit_rows: Tensor | None = None
        if plan.chunks:
            prompts, inputs, logit_rows, drawing = self._prompts(plan, decode_rows)
            parts.append(inputs)
            rows = torch.cat([rows, drawing])
        batch = PackedBatch(
            tokens=_joined([part.tokens for part in parts]),
            positions=_joined([part.positions for part in parts]),
            slots=_joined([part.slots for part in parts]),
            attention=self._masks(plan, decode_rows) if plan.chunks else {},
            logit_rows=logit_rows,
            paged=PagedAttention(decode_rows, decode, prompts),
        )
        return batch, rows

    def decode_rows(
        self, decode: Seq[Sequence], rows: Tensor, layout: DraftLayout | None
    ) -> tuple[PagedRows, StepInputs]:
        """Return the rows of sequences that decode, and their inputs; rows: [S] int64."""
        count = len(decode)
        known = torch.empty_like(rows)
        if layout is None:
            order, ones, zeros = self._order[:count], self._ones[:count], self._zeros[:count]
            paged = PagedRows(
                *(self._state.block_table, rows, known, order, zeros, ones, zeros, ones, order),
                *(self._pieces(decode, [0] * count), 1),
            )
            drafts = None
        else:
            shape = layout.shape
            paged = PagedRows(
                *(self._state.block_table, rows, known, shape.device_starts),
                *(shape.device_starts - self._order[:count], shape.device_counts),
                *(shape.device_depth, shape.device_ancestor_bits, shape.device_owner),
                *(self._pieces(decode, shape.counts), rows_bound(1 + max(shape.counts))),
            )
            drafts = layout.tokens
        inputs = StepInputs(*torch.empty_like(paged.owner.expand(3, -1)).unbind())
        length, last_token = self._state.length, self._state.last_token
        fill_step_inputs(paged, length, last_token, drafts, inputs)
        return paged, inputs

    def _pieces(self, decode: Seq[Sequence], nodes: Seq[int]) -> PieceList:
        """Return an empty list for the contexts of ``decode`` with ``nodes`` [S] draft nodes."""
        keys = [len(s.tokens) + n for s, n in zip(decode, nodes, strict=True)]
        pieces = sum(map(piece_count, keys))
        return PieceList.empty(pieces, len(decode), self._state.device)

    def _state_rows(self, decode: Seq[Sequence]) -> Tensor:
        leases = [s.row_lease for s in decode]
        if leases != self._leases:
            self._leases = leases
            self._rows = upload([s.row for s in decode], self._state.device)
        return self._rows

    def _prompts(
        self, plan: StepPlan, decode_rows: int
    ) -> tuple[tuple[PromptRows, ...], StepInputs, Tensor, Tensor]:
        """Return the rows of all prompt chunks, their inputs, the rows of the batch that need
        logits, and the state rows of the sequences whose prompt ends."""
        spans = [(s, s.computed, s.computed + count) for s, count in plan.chunks]
        ends = [i for i, (s, _, end) in enumerate(spans) if end == len(s.tokens)]
        drawing = np.array([spans[i][0].row for i in ends], dtype=np.int64)
        last = decode_rows + np.cumsum([count for _, count in plan.chunks])[ends] - 1
        logits = np.concatenate([np.arange(decode_rows), last])
        prompts, inputs, more = pack_prompts(
            spans, self._state.device, logits, drawing, first_row=decode_rows
        )
        return prompts, inputs, more[0], more[1]

    def _masks(self, plan: StepPlan, decode_rows: int) -> dict[int, AttentionMetadata]:
        starts = np.cumsum([decode_rows, *(count for _, count in plan.chunks)])
        table = self._state.block_table
        return {
            window: AttentionMetadata(
                decode_rows,
                (),
                tuple(
                    chunk_attention(table[s.row], start, s.computed, count, window, self._like)
                    for (s, count), start in zip(plan.chunks, starts.tolist(), strict=False)
                ),
            )
            for window in self._windows
        }


def pack_prompts(
    spans: Seq[tuple[Sequence, int, int]],
    device: torch.device,
    *more: IntArray,
    first_row: int = 0,
) -> tuple[tuple[PromptRows, ...], StepInputs, list[Tensor]]:
    """Return the rows of prompt chunks, their inputs, and ``more`` (each [n]) on the device, after
    one copy. A span (sequence, first, end) stands for the tokens first .. end of a sequence. The
    rows begin with ``first_row`` of the batch."""
    starts = _starts([end - first for _, first, end in spans])
    slots = [pool_slots(s, 0, end) for s, _, end in spans]
    groups = _key_groups([len(own) for own in slots])
    parts = [
        np.concatenate([np.array(s.tokens[a:b], dtype=np.int64) for s, a, b in spans]),
        np.concatenate([np.arange(a, b) for _, a, b in spans]),
        np.concatenate([own[a:] for own, (_, a, _) in zip(slots, spans, strict=True)]),
        *more,
    ]
    for group in groups:
        parts.append(np.concatenate(slots[group]))
        parts.append(starts[group.start : group.stop + 1] - starts[group.start])
        parts.append(_starts([len(own) for own in slots[group]]))
    tokens, positions, own, *rest = upload_parts(parts, device)
    prompts = tuple(
        PromptRows(
            rows=slice(*(first_row + int(starts[i]) for i in (group.start, group.stop))),
            starts=first.int(),
            key_starts=first_key.int(),
            key_slots=keys,
            most_rows=max(end - begin for _, begin, end in spans[group]),
            most_keys=max(len(own) for own in slots[group]),
        )
        for group, (keys, first, first_key) in zip(
            groups, _in_threes(rest[len(more) :]), strict=True
        )
    )
    return prompts, StepInputs(tokens, positions, own), rest[: len(more)]


def _starts(counts: Seq[int]) -> IntArray:
    """Return the sums [n + 1] of the counts [n] before each one, and of all."""
    return np.concatenate([[0], np.cumsum(np.array(counts, dtype=np.int64))])


def _key_groups(keys: Seq[int]) -> list[slice]:
    """Divide chunks with ``keys`` each into runs of at most MOST_GATHERED_KEYS, or of one chunk."""
    groups, first, gathered = [], 0, 0
    for i, count in enumerate(keys):
        if i > first and gathered + count > MOST_GATHERED_KEYS:
            groups.append(slice(first, i))
            first, gathered = i, 0
        gathered += count
    return [*groups, slice(first, len(keys))]


def _in_threes(tensors: Seq[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    return zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True)


def _joined(parts: Seq[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
