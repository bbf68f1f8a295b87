"""Tokens, positions and slots of decode rows, read from the state of their sequences.

grid (sequences). The host needs no part of them, so a CUDA graph can begin here. The reference is
``Batcher``.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.paged_rows import PagedRows

_PAGE = tl.constexpr(32)


@dataclass(frozen=True)
class StepInputs:
    """The inputs of decode rows, which ``fill_step_inputs`` writes: [R] int64 each."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor  # -1 for a row that stands for no token


@triton.jit
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
    token_ptr,
    position_ptr,
    slot_ptr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,  # rows of every sequence; 0: each has its own count
):
    s = tl.program_id(0)
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
    first_node: Tensor,
    out: StepInputs,
    *,
    padded: bool = False,
) -> None:
    """Write ``rows.known`` and ``out``.

    length, last_token: [state rows] int64. drafts: tokens [nodes] int64, those of a sequence from
    ``first_node`` [S] on. ``padded``: every sequence has ``rows.most_rows`` rows, of which those
    beyond its count get the token and position 0, and no slot.
    """
    write_step_inputs[(len(rows.state_row),)](
        *(rows.table, rows.table.stride(0), length, last_token),
        last_token if drafts is None else drafts,
        *(rows.state_row, rows.first_row, first_node, rows.row_count, rows.depth, rows.known),
        *(out.tokens, out.positions, out.slots),
        ROWS=triton.next_power_of_2(rows.most_rows),
        PADDED=rows.most_rows if padded else 0,
        num_warps=1,
    )
