"""Accepting drafts on the device, and moving the KV of accepted ones to their positions.

    accept_paths   grid (sequences)           the accepted path of each; updates the state
    move_slots     grid (sequences, layers)   for trees; a chain's KV is at its positions

The rows of a sequence are its last token and its draft nodes; a node comes after its parent. Row i
has its KV in slot ``known + i`` of the sequence. The references are ``accepted_nodes`` and
``KVPool.move``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.paged_rows import PagedRows
from protocol.block_keys import BLOCK_TOKENS

_PER_ROW = [
    *("drawn_ptr", "draft_ptr", "first_node_ptr", "ancestors_ptr", "state_row_ptr"),
    *("first_row_ptr", "row_count_ptr", "known_ptr"),
]
"""Their alignment may change from step to step, and must not make Triton compile again."""


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def accept_paths(
    drawn_ptr,  # [R] int64
    draft_ptr,  # [nodes] int64
    first_node_ptr,  # [S] int64
    ancestors_ptr,  # [R] int64
    state_row_ptr,  # [S] int64
    first_row_ptr,  # [S] int64
    row_count_ptr,  # [S] int64
    last_token_ptr,  # [state rows] int64
    length_ptr,  # [state rows] int64
    count_ptr,  # [S] int64
    path_ptr,  # [S, columns] int64
    token_ptr,  # [S, columns] int64
    columns,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64)
    row_count = tl.load(row_count_ptr + s)
    first = tl.load(first_row_ptr + s)
    row = tl.arange(0, ROWS)
    node = (row > 0) & (row < row_count)
    draft = tl.load(draft_ptr + tl.load(first_node_ptr + s) + row - 1, mask=node, other=-1)
    path_to = tl.load(ancestors_ptr + first + row, mask=node, other=0)
    path_to_parent = path_to ^ (tl.full([ROWS], 1, tl.int64) << row)

    column = tl.arange(0, WIDTH)
    token = tl.load(drawn_ptr + first, mask=row_count > 0, other=0)
    path = tl.where(column == 0, 0, -1)
    tokens = token + tl.zeros([WIDTH], tl.int64)
    depth = 0
    ancestors = tl.full([], 1, tl.int64)
    # Of siblings that both match, the first is accepted, and only its children may follow.
    match = node & (path_to_parent == ancestors) & (draft == token)
    accepted = tl.min(tl.where(match, row, ROWS), 0)
    while (accepted < ROWS) & (depth + 1 < columns):
        depth += 1
        token = tl.load(drawn_ptr + first + accepted)
        path = tl.where(column == depth, accepted, path)
        tokens = tl.where(column >= depth, token, tokens)
        ancestors = tl.load(ancestors_ptr + first + accepted)
        match = node & (path_to_parent == ancestors) & (draft == token)
        accepted = tl.min(tl.where(match, row, ROWS), 0)

    count = tl.where(row_count > 0, depth + 1, 0)
    tl.store(count_ptr + s, count)
    tl.store(path_ptr + s * columns + column, path, mask=column < columns)
    tl.store(token_ptr + s * columns + column, tokens, mask=column < columns)
    if count > 0:
        state_row = tl.load(state_row_ptr + s)
        tl.store(last_token_ptr + state_row, token)
        tl.store(length_ptr + state_row, tl.load(length_ptr + state_row) + count)


@triton.jit
def _slot(table_ptr, position, PAGE: tl.constexpr):
    page = tl.load(table_ptr + position // PAGE)
    return page * PAGE + position % PAGE


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def move_slots(
    values_ptr,  # [layers, slots, VALUES]
    exponents_ptr,  # [layers, slots, EXPONENTS] uint8, or None
    path_ptr,  # [S, columns] int64
    count_ptr,  # [S] int64
    columns,
    state_row_ptr,  # [S] int64
    known_ptr,  # [S] int64
    table_ptr,  # [state rows, max_pages] int64
    table_stride,
    slots,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPONENTS: tl.constexpr,
    EXPONENT_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    count = tl.load(count_ptr + s).to(tl.int32)
    known = tl.load(known_ptr + s)
    own_table_ptr = table_ptr + tl.load(state_row_ptr + s) * table_stride
    at = tl.arange(0, BLOCK)
    head = tl.arange(0, EXPONENT_BLOCK)
    place = 1
    # A row is never before its place, so in this order nothing is overwritten that is read later.
    while place < count:
        row = tl.load(path_ptr + s * columns + place)
        if row != place:
            source = layer * slots + _slot(own_table_ptr, known + row, PAGE)
            target = layer * slots + _slot(own_table_ptr, known + place, PAGE)
            values = tl.load(values_ptr + source * VALUES + at, mask=at < VALUES)
            tl.store(values_ptr + target * VALUES + at, values, mask=at < VALUES)
            if exponents_ptr is not None:
                scales = tl.load(exponents_ptr + source * EXPONENTS + head, mask=head < EXPONENTS)
                tl.store(exponents_ptr + target * EXPONENTS + head, scales, mask=head < EXPONENTS)
        place += 1


class AcceptedPaths:
    """The result of ``accept_drafts`` for up to ``sequences`` sequences and ``depth`` accepted
    drafts of each, allocated once. The engine that launches the kernels owns it."""

    def __init__(self, sequences: int, depth: int, device: torch.device) -> None:
        # [S] tokens drawn: one more than the accepted nodes; 0 for padding
        self.counts = torch.zeros(sequences, dtype=torch.int64, device=device)
        # [S, 1 + D] rows on the path, counted from the sequence's first; padded with -1
        self.paths = self.counts.new_zeros(sequences, depth + 1)
        # [S, 1 + D] tokens drawn, the last one repeated
        self.tokens = torch.zeros_like(self.paths)


def accept_drafts(
    drawn: Tensor,
    rows: PagedRows,
    drafts: Tensor,
    length: Tensor,
    last_token: Tensor,
    out: AcceptedPaths,
) -> None:
    """Accept each draft node whose parent is accepted and drew the node's token, down to the depth
    of ``out``. Write ``out``, and append the tokens to length and last_token [state rows] int64.

    drawn: [R] int64, the token drawn after each row. drafts: tokens [nodes] int64, those of a
    sequence from ``rows.first_node`` on. A sequence with ``row_count`` 0 changes no state.
    """
    count, columns = len(rows.state_row), out.paths.shape[1]
    assert count <= len(out.counts)
    accept_paths[(count,)](
        *(drawn, drafts, rows.first_node, rows.ancestors, rows.state_row, rows.first_row),
        *(rows.row_count, last_token, length, out.counts, out.paths, out.tokens, columns),
        ROWS=rows.most_rows,
        WIDTH=triton.next_power_of_2(columns),
        num_warps=1,
    )


def move_accepted_kv(pool: Sequence[Tensor], rows: PagedRows, accepted: AcceptedPaths) -> None:
    """Move the KV of accepted nodes to the slots of their positions, in every layer.

    pool: values [layers, pages, page_tokens, 2, kv_heads, head_dim] of any type; an fp8 pool has
    exponents [layers, pages, page_tokens, 2, kv_heads] as well.
    """
    values, exponents = pool[0], pool[1] if len(pool) > 1 else None
    assert values.is_contiguous() and (exponents is None or exponents.is_contiguous())
    elements, heads = values[0, 0, 0].numel(), values[0, 0, 0, ..., 0].numel()
    move_slots[(len(rows.state_row), len(values))](
        *(values, exponents, accepted.paths, accepted.counts, accepted.paths.shape[1]),
        *(rows.state_row, rows.known, rows.table, rows.table.stride(0)),
        values.shape[1] * BLOCK_TOKENS,
        VALUES=elements,
        BLOCK=triton.next_power_of_2(elements),
        EXPONENTS=heads,
        EXPONENT_BLOCK=triton.next_power_of_2(heads),
        PAGE=BLOCK_TOKENS,
        num_warps=4,
    )
