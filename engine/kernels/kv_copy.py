"""Kernels that move KV frames between staging memory on the GPU and the pages of a pool.

    staging  [slots, slot_bytes] uint8, one frame each (layout: ``engine/kv_cache/kv_format.py``)
    unit     one layer of one page: ``vectors`` = page_tokens * 2 * kv_heads vectors of ``head_dim``

A unit is contiguous in the frame and in the pool, and so are its exponents. One launch moves all
frames of one codec; program (f, u, p) moves part ``p`` of unit ``u`` of frame ``f``. What to move
is a table [frames, 4 + blocks] int64, uploaded without a wait:

    slot, layer, layers, blocks, page of the first block, page of the second, ...

``KVPool.read`` and ``write`` are the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.fp8 import (
    LARGEST,
    MAX_EXPONENT,
    MIN_EXPONENT,
    pack_e4m3,
    power_of_two,
    round_rows,
    unpack_e4m3,
)
from engine.kv_cache.kv_format import Codec
from engine.kv_cache.kv_pool import (
    Fp8Pool,
    FrameCopy,
    FrameDefect,
    KVPool,
    WidePool,
)
from engine.uploads import upload
from protocol.block_keys import BLOCK_TOKENS

TILE = 4096
"""Elements that one program moves."""

_HEADER = tl.constexpr(4)  # columns of the table before the pages
_BAD_SCALE = tl.constexpr(int(FrameDefect.SCALE))
_BAD_BYTE = tl.constexpr(int(FrameDefect.NAN_BYTE))
_BAD_VALUE = tl.constexpr(int(FrameDefect.VALUE))


def scatter_frames(pool: KVPool, staging: Tensor, frames: Sequence[FrameCopy]) -> None:
    """Copy frames that ``find_defects`` has passed from ``staging`` [slots, slot_bytes] to the
    pages of ``pool``, on the current stream. Of two frames with the same unit either may stay."""
    for codec, group in _by_codec(frames):
        _launch_copy(pool, staging, codec, group, to_pool=True)


def gather_frames(pool: KVPool, staging: Tensor, frames: Sequence[FrameCopy]) -> None:
    """Copy frames from the pages of ``pool`` to ``staging`` [slots, slot_bytes], on the current
    stream."""
    for codec, group in _by_codec(frames):
        _launch_copy(pool, staging, codec, group, to_pool=False)


def find_defects(pool: KVPool, staging: Tensor, frames: Sequence[FrameCopy]) -> Tensor:
    """Return the ``FrameDefect`` of each received frame, int32 [frames] on the device. It reads
    ``staging`` alone, so it may run on another stream than the steps."""
    defects = torch.zeros(len(frames), dtype=torch.int32, device=staging.device)
    order = {id(frame): index for index, frame in enumerate(frames)}
    for codec, group in _by_codec(frames):
        shape = _UnitShape(pool)
        table = _upload_table(group, staging.device)
        indices = upload([order[id(frame)] for frame in group], staging.device)
        values = _values(staging, pool, codec)
        _check_frames[shape.grid(group)](
            *(values, defects, indices, table, table.shape[1], values.stride(0)),
            FP8=codec is Codec.FP8,
            **shape.constants(),
        )
    return defects


class _UnitShape:
    """How the programs of a launch divide the units of one pool."""

    def __init__(self, pool: KVPool) -> None:
        self.vectors = BLOCK_TOKENS * 2 * pool.format.kv_heads
        self.head_dim = pool.format.head_dim
        self.block_d = triton.next_power_of_2(self.head_dim)
        self.block_v = max(1, TILE // self.block_d)

    def grid(self, frames: Sequence[FrameCopy]) -> tuple[int, int, int]:
        units = max(f.piece.layers * f.piece.blocks for f in frames)
        return len(frames), units, triton.cdiv(self.vectors, self.block_v)

    def constants(self) -> dict[str, int]:
        return {
            "VECTORS": self.vectors,
            "HEAD_DIM": self.head_dim,
            "BLOCK_V": self.block_v,
            "BLOCK_D": self.block_d,
        }


def _launch_copy(
    pool: KVPool, staging: Tensor, codec: Codec, frames: Sequence[FrameCopy], *, to_pool: bool
) -> None:
    shape = _UnitShape(pool)
    table = _upload_table(frames, staging.device)
    values = _values(staging, pool, codec)
    stored, exponents = _stored(pool)
    _copy_frames[shape.grid(frames)](
        *(values, stored, exponents, table, table.shape[1], values.stride(0), stored.shape[1]),
        TO_POOL=to_pool,
        FRAME_FP8=codec is Codec.FP8,
        POOL_FP8=pool.format.stored is Codec.FP8,
        ROUND=to_pool and pool.format.precision == "fp8",
        **shape.constants(),
    )


def _by_codec(frames: Sequence[FrameCopy]) -> Iterator[tuple[Codec, list[FrameCopy]]]:
    for codec in Codec:
        if group := [frame for frame in frames if frame.codec is codec]:
            yield codec, group


def _values(staging: Tensor, pool: KVPool, codec: Codec) -> Tensor:
    """Return ``staging`` [slots, slot_bytes] uint8 as the type of the frames' values."""
    return staging if codec is Codec.FP8 else staging.view(pool.dtype)


def _stored(pool: KVPool) -> tuple[Tensor, Tensor]:
    """Return the pool's values or bytes, and its exponents. A wide pool has none: any tensor."""
    if isinstance(pool, Fp8Pool):
        return pool.payload, pool.exponents
    assert isinstance(pool, WidePool)
    return pool.tensor, pool.tensor


def _upload_table(frames: Sequence[FrameCopy], device: torch.device) -> Tensor:
    width = max(len(frame.pages) for frame in frames)
    rows = [
        [slot, piece.layer, piece.layers, piece.blocks, *pages, *[0] * (width - len(pages))]
        for slot, piece, pages, _ in frames
    ]
    return upload(np.array(rows, dtype=np.int64), device)


# ---- kernels ------------------------------------------------------------------------------------


@triton.jit
def _tile(BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, VECTORS, HEAD_DIM):
    """Return this program's vectors [BLOCK_V] of a unit and which of them there are, and the same
    for their elements [BLOCK_V, BLOCK_D]."""
    vector = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    element = tl.arange(0, BLOCK_D)
    has_vector = vector < VECTORS
    has_element = has_vector[:, None] & (element < HEAD_DIM)[None, :]
    return vector, has_vector, vector[:, None] * HEAD_DIM + element[None, :], has_element


@triton.jit(do_not_specialize=["table_width"])
def _copy_frames(
    frames,  # [slots, frame_stride] staging, in the type of the frames' values
    stored,  # [layers, pages, vectors, head_dim] values or bytes of the pool
    exponents,  # [layers, pages, vectors] uint8 of an fp8 pool
    table,  # [frames, table_width] int64
    table_width,
    frame_stride,  # elements
    pages,  # of the pool
    TO_POOL: tl.constexpr,
    FRAME_FP8: tl.constexpr,
    POOL_FP8: tl.constexpr,
    ROUND: tl.constexpr,
    VECTORS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Move one part of one unit of one frame. Grid: (frames, units of the largest frame, parts)."""
    row = table + tl.program_id(0) * table_width
    unit = tl.program_id(1)
    blocks = tl.load(row + 3)
    units = tl.load(row + 2) * blocks
    if unit < units:
        page = tl.load(row + _HEADER + unit % blocks)
        layer = tl.load(row + 1) + unit // blocks
        in_pool = layer * pages + page  # the unit's index
        frame = frames + tl.load(row) * frame_stride
        vector, has_vector, element, has_element = _tile(BLOCK_V, BLOCK_D, VECTORS, HEAD_DIM)
        frame_values = frame + unit * (VECTORS * HEAD_DIM) + element
        frame_exponents = frame + (units * HEAD_DIM + unit) * VECTORS + vector
        pool_values = stored + in_pool * (VECTORS * HEAD_DIM) + element
        pool_exponents = exponents + in_pool * VECTORS + vector
        if TO_POOL:
            _move(
                frame_values,
                frame_exponents,
                pool_values,
                pool_exponents,
                has_vector,
                has_element,
                FRAME_FP8,
                POOL_FP8,
                ROUND,
            )
        else:
            _move(
                pool_values,
                pool_exponents,
                frame_values,
                frame_exponents,
                has_vector,
                has_element,
                POOL_FP8,
                FRAME_FP8,
                ROUND,
            )


@triton.jit
def _move(
    source,
    source_exponents,
    target,
    target_exponents,
    has_vector,
    has_element,
    SOURCE_FP8: tl.constexpr,
    TARGET_FP8: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Copy, decode, round or encode a tile, whose pointers and masks are given."""
    x = tl.load(source, mask=has_element, other=0)
    if SOURCE_FP8:
        biased = tl.load(source_exponents, mask=has_vector, other=0)
        if TARGET_FP8:
            tl.store(target_exponents, biased, mask=has_vector)
        else:
            scale = power_of_two(biased.to(tl.int32) + MIN_EXPONENT)
            x = unpack_e4m3(x) * scale[:, None]
    elif ROUND or TARGET_FP8:
        x, exponent = round_rows(x.to(tl.float32))
        if TARGET_FP8:
            x = pack_e4m3(x, exponent)
            biased = (exponent - MIN_EXPONENT).to(tl.uint8)
            tl.store(target_exponents, biased, mask=has_vector)
    # Values on the grid are exact in every type.
    tl.store(target, x.to(target.dtype.element_ty), mask=has_element)


@triton.jit(do_not_specialize=["table_width"])
def _check_frames(
    frames,  # [slots, frame_stride] staging, in the type of the frames' values
    defects,  # [all frames] int32, zeros
    indices,  # [frames] int64, places in ``defects``
    table,  # [frames, table_width] int64
    table_width,
    frame_stride,  # elements
    FP8: tl.constexpr,
    VECTORS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Report what is wrong with one part of one unit. The grid is that of ``_copy_frames``."""
    row = table + tl.program_id(0) * table_width
    unit = tl.program_id(1)
    units = tl.load(row + 2) * tl.load(row + 3)
    if unit < units:
        frame = frames + tl.load(row) * frame_stride
        vector, has_vector, element, has_element = _tile(BLOCK_V, BLOCK_D, VECTORS, HEAD_DIM)
        source = frame + unit * (VECTORS * HEAD_DIM) + element
        if FP8:
            code = tl.load(source, mask=has_element, other=0).to(tl.int32) & 0x7F
            place = frame + (units * HEAD_DIM + unit) * VECTORS + vector
            scale = tl.load(place, mask=has_vector, other=0).to(tl.int32)
            found = tl.where(tl.max(tl.max(code, axis=1), axis=0) == 0x7F, _BAD_BYTE, 0)
            largest = tl.max(scale, axis=0)
            found |= tl.where(largest > MAX_EXPONENT - MIN_EXPONENT, _BAD_SCALE, 0)
        else:
            x = tl.load(source, mask=has_element, other=0).to(tl.float32)
            wrong = tl.where(tl.abs(x) <= LARGEST, 0, 1)  # 1 for NaN, too
            found = tl.max(tl.max(wrong, axis=1), axis=0) * _BAD_VALUE
        target = defects + tl.load(indices + tl.program_id(0))
        tl.atomic_or(target, found, mask=found != 0)
