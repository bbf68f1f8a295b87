"""Inputs of decode rows: tokens, positions, slots, and the list of the pieces of their contexts.

grid (sequences). They are read from the state of the sequences, and the host needs no part of them,
so a CUDA graph can begin here. The reference is ``Batcher``.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.paged_rows import PIECE_TOKENS, PagedRows

_PAGE = tl.constexpr(32)


@dataclass(frozen=True)
class StepInputs:
    """The inputs of decode rows, which ``fill_step_inputs`` writes: [R] int64 each."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor  # -1 for a row that stands for no token


_PER_ROW = [
    *("draft_ptr", "state_row_ptr", "first_row_ptr", "first_node_ptr", "row_count_ptr"),
    *("depth_ptr", "known_ptr", "items_ptr", "starts_ptr", "total_ptr"),
    *("token_ptr", "position_ptr", "slot_ptr"),
]
"""Their alignment may change from step to step, and must not make Triton compile again."""


@triton.jit(do_not_specialize=["sequences"], do_not_specialize_on_alignment=_PER_ROW)
def write_step_inputs(
    table_ptr,
    table_stride,
    length_ptr,  # [state rows] int64, tokens known
    last_token_ptr,  # [state rows] int64
    draft_ptr,  # [nodes] int64, tokens of draft nodes
    state_row_ptr,
    first_row_ptr,
    first_node_ptr,  # [S] int64, first draft node of each sequence
    row_count_ptr,
    depth_ptr,
    known_ptr,
    items_ptr,  # the list of pieces
    starts_ptr,
    total_ptr,
    token_ptr,
    position_ptr,
    slot_ptr,
    sequences,
    SEQUENCES: tl.constexpr,  # bound of the sequences, a power of two
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,  # rows of every sequence; 0: each has its own count
):
    s = tl.program_id(0).to(tl.int64)
    # The pieces of the sequences before this one tell where its own ones begin.
    other = tl.arange(0, SEQUENCES)
    counted = other < sequences
    others = tl.load(row_count_ptr + other, mask=counted, other=0)
    other_row = tl.load(state_row_ptr + other, mask=counted, other=0)
    keys = tl.load(length_ptr + other_row, mask=counted, other=0) - 1 + others
    pieces = tl.where(others > 0, (keys + PIECE - 1) // PIECE, 0)
    start = tl.sum(tl.where(other < s, pieces, 0), 0)
    own = tl.sum(tl.where(other == s, pieces, 0), 0)
    tl.store(starts_ptr + s, start)
    if s == 0:
        tl.store(total_ptr, tl.sum(pieces, 0))
    for first in range(0, own, 32):
        piece = first + tl.arange(0, 32)
        tl.store(items_ptr + start + piece, (s << 32) | piece, mask=piece < own)
    count = tl.load(row_count_ptr + s)
    state_row = tl.load(state_row_ptr + s)
    known = tl.load(length_ptr + state_row) - 1
    known = tl.where(count > 0, known, 0)
    tl.store(known_ptr + s, known)
    i = tl.arange(0, ROWS)
    live = i < count
    written = (i < PADDED) if PADDED else live
    row = tl.load(first_row_ptr + s) + i
    node = tl.load(first_node_ptr + s) + i - 1
    draft = tl.load(draft_ptr + node, mask=live & (i > 0), other=0)
    token = tl.where(i == 0, tl.load(last_token_ptr + state_row), draft)
    depth = tl.load(depth_ptr + row, mask=live, other=0)
    place = known + i
    page = tl.load(table_ptr + state_row * table_stride + place // _PAGE, mask=live, other=0)
    tl.store(token_ptr + row, tl.where(live, token, 0), mask=written)
    tl.store(position_ptr + row, tl.where(live, known + depth, 0), mask=written)
    tl.store(slot_ptr + row, tl.where(live, page * _PAGE + place % _PAGE, -1), mask=written)


def fill_step_inputs(
    rows: PagedRows,
    length: Tensor,
    last_token: Tensor,
    drafts: Tensor | None,
    out: StepInputs,
    *,
    padded: bool = False,
) -> None:
    """Write ``rows.known``, ``rows.pieces`` and ``out``.

    length, last_token: [state rows] int64. drafts: tokens [nodes] int64. ``padded``: every sequence
    has ``rows.most_rows`` rows, of which those beyond its count get the token and position 0, and
    no slot.
    """
    write_step_inputs[(len(rows.state_row),)](
        *(rows.table, rows.table.stride(0), length, last_token),
        last_token if drafts is None else drafts,
        *(rows.state_row, rows.first_row, rows.first_node, rows.row_count, rows.depth, rows.known),
        *(rows.pieces.items, rows.pieces.starts, rows.pieces.total),
        *(out.tokens, out.positions, out.slots, len(rows.state_row)),
        SEQUENCES=triton.next_power_of_2(len(length)),
        PIECE=PIECE_TOKENS,
        ROWS=rows.most_rows,
        PADDED=rows.most_rows if padded else 0,
        num_warps=1,
    )
