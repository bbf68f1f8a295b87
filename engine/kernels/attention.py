"""Attention of decode rows over the paged KV pool, split over the context.

    pieces   grid (pieces * KV heads)  each program attends to PIECE_TOKENS tokens of a sequence
    merged   grid (rows, heads)        adds up the pieces of a row in their order

The grid has one program for each piece that exists (``PieceList``), so that a long context beside
short ones costs only its own pieces.

Which rows a sequence has and what they attend to is described by ``PagedRows``. The query heads
that share a KV head, times the rows of a sequence, are the rows of one matrix product.

A piece has a fixed number of tokens, so the bits of a row's result do not depend on the other rows
of the batch (Dao et al., Flash-Decoding, 2023, with pieces of fixed size). Under fp8 storage the
products see the raw e4m3 values: a scale is a power of two, so it commutes with rounding. K's scale
multiplies the scores, and V's the probabilities, relative to the largest scale of the tile, which
keeps them within fp16.

V is read as pairs of bytes. A matrix product needs it transposed, which instructions do for
elements of 16 bits, while single bytes take a load each. So one product computes the even
dimensions of the result from the lower bytes, and another one the odd dimensions. The reference is
``engine.model.attention``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import fp8 as fp8_grid
from engine.kernels.fp8 import (
    INTERPRETED,
    MIN_EXPONENT,
    e4m3_halves,
    e4m3_values,
    power_of_two,
)
from engine.kernels.kv_store import PoolLayer
from engine.kernels.paged_rows import MAX_ROWS, PIECE_TOKENS, PagedRows

_PAGE = tl.constexpr(32)  # tokens of a page

TILE, SMALL_TILE = 64, 32
"""Tokens that the inner loop reads at a time: under fp8 storage, and for wide values or few rows
with drafts.

Under fp8 storage, instructions limit the kernel and not memory. Of tiles with 32 to 256 tokens,
programs with 1 to 8 warps and loads 1 to 4 tiles ahead, the choices of this module were the fastest
for large batches on an H100 (one row a sequence) and an H200 (2 to 32 rows)."""

WARPS, WIDE_WARPS = 2, 4
"""Warps of a program with few rows, under fp8 storage and for wide values."""

MOST_REGISTERS = 168
"""Of a thread, with WARPS and one row a sequence: six programs fit on a multiprocessor with 65,536
of them. Of two variants on an H100, the one with 168 took 13% less time than the one with 180."""


MOST_QUERY_BYTES = 32 << 10
"""Of the queries of a program that attends for a run of prompt tokens. With twice as many, bf16
queries need more registers than there are, and fp32 ones more shared memory than sm_89 has."""


@dataclass(frozen=True)
class AttentionShape:
    """What attention of one layer depends on besides its tensors. ``window`` 0: no window."""

    scale: float
    softcap: float
    window: int


def product_rows(most_rows: int, group: int) -> int:
    """Return the rows of the matrix product: a power of two, at least the 16 of a tensor core."""
    rows: int = max(16, triton.next_power_of_2(most_rows * group))
    return rows


def rows_of_runs(most: int, group: int, head_dim: int, element: int) -> int:
    """Return how many rows a run of prompt tokens may have, at most ``most``: a power of two. It
    has ``group`` query heads for each KV head, with elements of ``element`` bytes."""
    row_bytes = triton.next_power_of_2(head_dim) * element
    while most > 1 and product_rows(most, group) * row_bytes > MOST_QUERY_BYTES:
        most //= 2
    return most


@triton.jit
def first_piece(known, WINDOW: tl.constexpr, PIECE: tl.constexpr):
    """Return the first piece in reach of the first row of a sequence with ``known`` tokens."""
    if WINDOW > 0:
        return tl.maximum(known + 1 - WINDOW, 0) // PIECE
    return known * 0


@triton.jit
def _log2_scores(scores, softcap, SOFTCAP: tl.constexpr):
    """Return scores times log2(e), which are so without a soft cap already."""
    if SOFTCAP:
        t = tl.exp(-2.0 * tl.abs(scores) / softcap)  # tanh(x) = (1 - t) / (1 + t), x >= 0
        capped = softcap * (1.0 - t) / (1.0 + t)
        scores = tl.where(scores < 0, -capped, capped) * 1.4426950408889634
    return scores


@triton.jit
def _on_path(visible, position, key, known, depth, WINDOW: tl.constexpr):
    """Return which keys [keys] the rows attend to that have the bits ``visible`` [rows] and are at
    ``position`` [rows]. depth: [keys], of keys that are draft nodes."""
    node = key - known
    bit = (visible[:, None] >> tl.minimum(tl.maximum(node, 0), 31)[None, :]) & 1
    seen = (node < 0)[None, :] | (bit != 0)
    if WINDOW > 0:
        place = tl.where(node >= 0, known + depth, key)
        seen = seen & (place[None, :] > position[:, None] - WINDOW)
    return seen


_PER_ROW = [
    *("state_row_ptr", "known_ptr", "first_row_ptr", "row_count_ptr", "depth_ptr"),
    *("ancestors_ptr", "owner_ptr", "items_ptr", "starts_ptr", "total_ptr"),
]
"""Their alignment may change from step to step, and must not make Triton compile again."""


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def attention_pieces(
    q_ptr,  # [R, heads, D]
    q_stride,
    kv_ptr,  # one layer of the pool: [pages, 32, 2, KV_HEADS, D], uint8 or values
    exponents_ptr,  # fp8 storage: [pages, 32, 2, KV_HEADS] uint8
    table_ptr,
    table_stride,
    state_row_ptr,
    known_ptr,
    first_row_ptr,
    row_count_ptr,
    depth_ptr,
    ancestors_ptr,
    items_ptr,
    total_ptr,
    out_ptr,  # [pieces, rows of a sequence, heads, D] fp32
    lse_ptr,  # [pieces, rows of a sequence, heads] fp32, in base 2
    scale,  # of scores, times log2(e) unless there is a soft cap
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,  # of the matrix product
    MOST: tl.constexpr,  # rows of a sequence
    PIECE: tl.constexpr,
    TILE: tl.constexpr,  # tokens that the inner loop reads at a time
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    head = tl.program_id(0) % KV_HEADS
    index = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    if index >= tl.load(total_ptr):
        return
    item = tl.load(items_ptr + index)
    s, piece = item >> 32, (item & 0xFFFFFFFF).to(tl.int32)
    count = tl.load(row_count_ptr + s).to(tl.int32)
    known = tl.load(known_ptr + s).to(tl.int32)
    end = known + count
    start = piece * PIECE
    if piece < first_piece(known, WINDOW, PIECE):
        return
    first_row = tl.load(first_row_ptr + s)
    m = tl.arange(0, ROWS)
    own = m // GROUP  # row of the sequence
    live = own < count
    row = first_row + tl.where(live, own, 0)
    query_head = head * GROUP + m % GROUP
    d = tl.arange(0, BLOCK_D)
    at_d = d < D
    q = tl.load(
        q_ptr + row[:, None] * q_stride + query_head[:, None] * D + d[None, :],
        mask=live[:, None] & at_d[None, :],
        other=0.0,
    )
    if tl.float16 == PRODUCT:
        q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0)
    q = q.to(PRODUCT)
    if MOST > 1:
        visible = tl.load(ancestors_ptr + row).to(tl.int32)
        position = known + tl.load(depth_ptr + row).to(tl.int32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if FP8:
        even = tl.zeros([ROWS, BLOCK_D // 2], tl.float32)
        odd = tl.zeros([ROWS, BLOCK_D // 2], tl.float32)
        half_d = tl.arange(0, BLOCK_D // 2)
    else:
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    table = table_ptr + tl.load(state_row_ptr + s) * table_stride
    last_page = (end - 1) // _PAGE
    for tile in range(start, tl.minimum(start + PIECE, end), TILE):
        key = tile + tl.arange(0, TILE)
        inside = key < end
        page = tl.load(table + tl.minimum(key // _PAGE, last_page)).to(tl.int32)
        at = (page * _PAGE + key % _PAGE) * (2 * KV_HEADS) + head
        k_at = kv_ptr + at.to(tl.int64)[:, None] * D
        v_at = k_at + KV_HEADS * D
        if FP8:
            # What the slots behind the last token hold is finite in fp8, and gets no weight.
            pair_at = v_at.to(tl.pointer_type(tl.int16)) + half_d[None, :]
            if D == BLOCK_D:
                k = tl.load(k_at + d[None, :])
                v = tl.load(pair_at)
            else:
                k = tl.load(k_at + d[None, :], mask=at_d[None, :], other=0)
                v = tl.load(pair_at, mask=(2 * half_d < D)[None, :], other=0)
            k = e4m3_values(k, NATIVE)
            k_scale = tl.load(exponents_ptr + at).to(tl.int32)
            v_scale = tl.load(exponents_ptr + at + KV_HEADS).to(tl.int32)
        else:
            mask = inside[:, None] & at_d[None, :]
            k = tl.load(k_at + d[None, :], mask=mask, other=0)
            v = tl.load(v_at + d[None, :], mask=mask, other=0)
        scores = tl.dot(q, tl.trans(k.to(PRODUCT)), input_precision="ieee")
        if FP8:
            scores = scores * (power_of_two(k_scale + MIN_EXPONENT) * scale)[None, :]
        else:
            scores = scores * scale
        scores = _log2_scores(scores, softcap, SOFTCAP)
        if MOST == 1:
            seen = inside[None, :]
            if WINDOW > 0:
                seen = seen & (key > known - WINDOW)[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        elif (WINDOW > 0) | (tile + TILE > known):  # all rows attend to all tokens before them
            node = (key >= known) & inside
            depth = tl.load(depth_ptr + first_row + key - known, mask=node, other=0).to(tl.int32)
            seen = inside[None, :] & _on_path(visible, position, key, known, depth, WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        best = tl.maximum(peak, tl.max(scores, 1))
        if MOST > 1 or WINDOW > 0:  # otherwise every row attends to the first key of each piece
            safe = tl.where(best == float("-inf"), 0.0, best)
        else:
            safe = best
        p = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(peak - safe)
        total = total * shrink + tl.sum(p, 1)
        if FP8:
            v_scale = tl.where(inside, v_scale, 0)
            top = tl.max(v_scale, 0)
            p = (p * power_of_two(v_scale - top)[None, :]).to(PRODUCT)
            unit = power_of_two(top + MIN_EXPONENT)
            low = tl.dot(p, e4m3_halves(v, False, NATIVE).to(PRODUCT), input_precision="ieee")
            high = tl.dot(p, e4m3_halves(v, True, NATIVE).to(PRODUCT), input_precision="ieee")
            even = even * shrink[:, None] + low * unit
            odd = odd * shrink[:, None] + high * unit
        else:
            acc = acc * shrink[:, None]
            acc += tl.dot(p.to(PRODUCT), v.to(PRODUCT), input_precision="ieee")
        peak = best
    if FP8:
        acc = tl.interleave(even, odd)
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    lse = tl.where(total > 0, peak + tl.log2(total), float("-inf"))
    to = (index * MOST + own) * (KV_HEADS * GROUP) + query_head
    tl.store(out_ptr + to[:, None] * D + d[None, :], result, mask=live[:, None] & at_d[None, :])
    tl.store(lse_ptr + to, lse, mask=live)


@triton.jit(do_not_specialize_on_alignment=_PER_ROW)
def merge_pieces(
    part_ptr,
    lse_ptr,
    starts_ptr,
    known_ptr,
    first_row_ptr,
    row_count_ptr,
    owner_ptr,
    out_ptr,  # [R, heads, D]
    out_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MOST: tl.constexpr,
    PIECE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    s = tl.load(owner_ptr + row)
    known, count = tl.load(known_ptr + s), tl.load(row_count_ptr + s)
    own = row - tl.load(first_row_ptr + s)
    first = first_piece(known, WINDOW, PIECE)
    used = tl.where(own < count, (known + count + PIECE - 1) // PIECE - first, 0)
    index = tl.load(starts_ptr + s) + first
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, used, TILE):
        piece = start + tl.arange(0, TILE)
        live = piece < used
        at = ((index + piece) * MOST + own) * HEADS + head
        lse = tl.load(lse_ptr + at, mask=live, other=float("-inf"))
        part = tl.load(
            part_ptr + at[:, None] * D + d[None, :],
            mask=live[:, None] & (d < D)[None, :],
            other=0.0,
        )
        best = tl.maximum(peak, tl.max(lse, 0))
        safe = tl.where(best == float("-inf"), 0.0, best)
        weight = tl.exp2(lse - safe)
        shrink = tl.exp2(peak - safe)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(part * weight[:, None], 0)
        peak = best
    result = acc / tl.where(total > 0, total, 1.0)
    to = out_ptr + row * out_stride + head * D + d
    tl.store(to, result.to(out_ptr.dtype.element_ty), mask=d < D)


def decode_attention(
    q: Tensor, layer: PoolLayer, rows: PagedRows, shape: AttentionShape, out: Tensor
) -> None:
    """Compute attention of R decode rows q [R, heads, D] into ``out`` [R, heads, D]. Both are
    contiguous in their last two dimensions.

    The KV of the rows themselves is in the pool's ``layer``.
    """
    count, heads, head_dim = q.shape
    kv, exponents, pieces = layer.values, layer.exponents, rows.pieces
    kv_heads, most = kv.shape[3], rows.most_rows
    assert most <= MAX_ROWS
    # The partial results of each piece; torch keeps their memory for the next layer.
    part = q.new_empty((len(pieces.items), most, heads, head_dim), dtype=torch.float32)
    lse = q.new_empty((len(pieces.items), most, heads), dtype=torch.float32)
    options = _options(q, kv, heads // kv_heads, most, shape)
    attention_pieces[(kv_heads * len(pieces.items),)](
        *(q, q.stride(0), kv, kv if exponents is None else exponents),
        *(rows.table, rows.table.stride(0), rows.state_row, rows.known, rows.first_row),
        *(rows.row_count, rows.depth, rows.ancestors, pieces.items, pieces.total, part, lse),
        shape.scale * (1.0 if shape.softcap else 1.4426950408889634),
        shape.softcap,
        **options,
        **_launch_options(options),
    )
    merge_pieces[(count, heads)](
        *(part, lse, pieces.starts, rows.known, rows.first_row, rows.row_count, rows.owner),
        *(out, out.stride(0)),
        HEADS=heads,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        MOST=most,
        PIECE=PIECE_TOKENS,
        WINDOW=shape.window,
        TILE=8,
        num_warps=1,
    )


def _launch_options(options: dict[str, Any]) -> dict[str, int]:
    """Return how the specialisation ``options`` of ``attention_pieces`` is launched."""
    # With fewer warps, programs with many accumulated values would run out of registers.
    rows, fp8 = options["ROWS"], options["FP8"]
    least = max(WARPS, rows >> 4) if fp8 else WIDE_WARPS
    warps = min(8, max(least, rows * options["BLOCK_D"] >> 11))
    stages = 3 if options["MOST"] == 1 or not fp8 else 2 if rows <= 32 else 1
    launch = {"num_warps": warps, "num_stages": stages}
    if fp8 and options["MOST"] == 1 and warps == WARPS and options["BLOCK_D"] <= 128:
        launch["maxnreg"] = MOST_REGISTERS
    return launch


def _options(
    q: Tensor, kv: Tensor, group: int, most_rows: int, shape: AttentionShape
) -> dict[str, Any]:
    """Return the specialisation of ``attention_pieces``."""
    fp8 = kv.dtype == torch.uint8
    product = tl.float32
    if not INTERPRETED:
        product = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}.get(
            torch.float32 if q.dtype == torch.float32 else kv.dtype, tl.float16
        )
    rows, block_d = product_rows(most_rows, group), max(32, triton.next_power_of_2(kv.shape[4]))
    return {
        "KV_HEADS": kv.shape[3],
        "GROUP": group,
        "D": kv.shape[4],
        "BLOCK_D": block_d,
        "ROWS": rows,
        "MOST": most_rows,
        "PIECE": PIECE_TOKENS,
        "TILE": TILE if fp8 and block_d <= 128 and (most_rows == 1 or rows > 16) else SMALL_TILE,
        "WINDOW": shape.window,
        "SOFTCAP": shape.softcap > 0,
        "FP8": fp8,
        "NATIVE": fp8 and fp8_grid.converts_e4m3(q.device),
        "PRODUCT": product,
    }
