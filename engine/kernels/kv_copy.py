"""Kernels that move KV frames between staging memory on the GPU and the pages of a pool.

    staging  [slots, slot_bytes] uint8, one frame each (layout: ``engine/kv_cache/kv_format.py``)
    unit     ``unit_tokens`` tokens in one layer, the smaller one of a page and a block: ``vectors``
             = unit_tokens * 2 * heads vectors of ``head_dim``

A unit is contiguous in the frame, and so are its exponents. It is contiguous in the pool where the
frame has all heads of the pool; else the heads of each token, K or V, are. One launch moves all
frames with the same codec and number of heads; program (f, u, p) moves part ``p`` of unit ``u`` of
frame ``f``. What to move is a table [frames, 5 + units] int64, uploaded without a wait:

    slot, layer, layers, units in a layer, first head in the pool, unit in the pool, unit, ...

``KVPool.read`` and ``write`` are the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from engine.kv_cache.kv_frames import FrameCopy, FrameDefect
from engine.kv_cache.kv_pool import Fp8Pool, KVPool, WidePool
from engine.uploads import upload

TILE = 4096
"""Elements that one program moves."""

_HEADER = tl.constexpr(5)  # columns of the table before the units
_BAD_SCALE = tl.constexpr(int(FrameDefect.SCALE))
_BAD_BYTE = tl.constexpr(int(FrameDefect.NAN_BYTE))
_BAD_VALUE = tl.constexpr(int(FrameDefect.VALUE))


def scatter_frames(pool: KVPool, staging: Tensor, frames: Sequence[FrameCopy]) -> None:
    """Copy frames that ``find_defects`` has passed from ``staging`` [slots, slot_bytes] to the
    pages of ``pool``, on the current stream. Of two frames with the same unit either may stay."""
    for launch in _launches(pool, frames):
        _launch_copy(pool, staging, launch, to_pool=True)


def gather_frames(pool: KVPool, staging: Tensor, frames: Sequence[FrameCopy]) -> None:
    """Copy frames from the pages of ``pool`` to ``staging`` [slots, slot_bytes], on the current
    stream."""
    for launch in _launches(pool, frames):
        _launch_copy(pool, staging, launch, to_pool=False)


def find_defects(pool: KVPool, staging: Tensor, frames: Sequence[FrameCopy]) -> Tensor:
    """Return the ``FrameDefect`` of each received frame, int32 [frames] on the device. It reads
    ``staging`` alone, so it may run on another stream than the steps."""
    defects = torch.zeros(len(frames), dtype=torch.int32, device=staging.device)
    order = {id(frame): index for index, frame in enumerate(frames)}
    for launch in _launches(pool, frames):
        table = launch.table(staging.device)
        indices = upload([order[id(frame)] for frame in launch.frames], staging.device)
        values = _values(staging, pool, launch.codec)
        _check_frames[launch.grid()](
            *(values, defects, indices, table, table.shape[1], values.stride(0)),
            FP8=launch.codec is Codec.FP8,
            **launch.constants(),
        )
    return defects


class _FrameLaunch:
    """Frames with the same codec and number of heads, and how programs divide their units."""

    def __init__(self, pool: KVPool, codec: Codec, heads: int, frames: Sequence[FrameCopy]) -> None:
        self.codec, self.heads, self.frames = codec, heads, frames
        self._format = pool.format
        self._units = [pool.format.units_of(frame.piece, frame.pages) for frame in frames]
        self._vectors = pool.format.unit_tokens * 2 * heads
        self._block_d = triton.next_power_of_2(pool.format.head_dim)
        self._block_v = max(1, TILE // self._block_d)

    def grid(self) -> tuple[int, int, int]:
        pairs = zip(self.frames, self._units, strict=True)
        most = max(frame.piece.layers * len(units) for frame, units in pairs)
        return len(self.frames), most, triton.cdiv(self._vectors, self._block_v)

    def constants(self) -> dict[str, int]:
        return {
            "VECTORS": self._vectors,
            "HEAD_DIM": self._format.head_dim,
            "BLOCK_V": self._block_v,
            "BLOCK_D": self._block_d,
        }

    def table(self, device: torch.device) -> Tensor:
        """Return the table [frames, 5 + units] int64 of the kernels on the device."""
        width = max(len(units) for units in self._units)
        rows = []
        for (slot, piece, _, _), units in zip(self.frames, self._units, strict=True):
            first = self._format.heads_of(piece).start
            header = [slot, piece.layer, piece.layers, len(units), first]
            rows.append([*header, *units, *[0] * (width - len(units))])
        return upload(np.array(rows, dtype=np.int64), device)


def _launches(pool: KVPool, frames: Sequence[FrameCopy]) -> list[_FrameLaunch]:
    groups: dict[tuple[Codec, int], list[FrameCopy]] = {}
    for frame in frames:
        heads = pool.format.heads_of(frame.piece)
        groups.setdefault((frame.codec, heads.stop - heads.start), []).append(frame)
    return [_FrameLaunch(pool, codec, heads, group) for (codec, heads), group in groups.items()]


def _launch_copy(pool: KVPool, staging: Tensor, launch: _FrameLaunch, *, to_pool: bool) -> None:
    table = launch.table(staging.device)
    values = _values(staging, pool, launch.codec)
    stored, exponents = _stored(pool)
    units = stored.shape[1] * (pool.format.page_tokens // pool.format.unit_tokens)
    _copy_frames[launch.grid()](
        *(values, stored, exponents, table, table.shape[1], values.stride(0), units),
        TO_POOL=to_pool,
        FRAME_FP8=launch.codec is Codec.FP8,
        POOL_FP8=pool.format.stored is Codec.FP8,
        **launch.constants(),
        HEADS=launch.heads,
        POOL_HEADS=pool.format.kv_heads,
    )


def _values(staging: Tensor, pool: KVPool, codec: Codec) -> Tensor:
    """Return ``staging`` [slots, slot_bytes] uint8 as the type of the frames' values."""
    return staging if codec is Codec.FP8 else staging.view(pool.dtype)


def _stored(pool: KVPool) -> tuple[Tensor, Tensor]:
    """Return the pool's values or bytes, and its exponents. A wide pool has none: any tensor."""
    if isinstance(pool, Fp8Pool):
        return pool.payload, pool.exponents
    assert isinstance(pool, WidePool)
    return pool.tensor, pool.tensor


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


@triton.jit
def _in_pool(vector, first_head, HEADS: tl.constexpr, POOL_HEADS: tl.constexpr):
    """Return where the vectors of a frame's unit are in the pool's unit, counted in vectors."""
    if HEADS == POOL_HEADS:
        place = vector
    else:
        place = vector // HEADS * POOL_HEADS + first_head + vector % HEADS
    return place


@triton.jit(do_not_specialize=["table_width"])
def _copy_frames(
    frames,  # [slots, frame_stride] staging, in the type of the frames' values
    stored,  # [layers, units, unit_tokens * 2 * POOL_HEADS, head_dim] values or bytes of the pool
    exponents,  # [layers, units, unit_tokens * 2 * POOL_HEADS] uint8 of an fp8 pool
    table,  # [frames, table_width] int64
    table_width,
    frame_stride,  # elements
    pool_units,
    TO_POOL: tl.constexpr,
    FRAME_FP8: tl.constexpr,
    POOL_FP8: tl.constexpr,
    VECTORS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    POOL_HEADS: tl.constexpr,
):
    """Move one part of one unit of one frame. Grid: (frames, units of the largest frame, parts)."""
    row = table + tl.program_id(0) * table_width
    unit = tl.program_id(1)
    in_layer = tl.load(row + 3)
    units = tl.load(row + 2) * in_layer
    if unit < units:
        layer = tl.load(row + 1) + unit // in_layer
        index = layer * pool_units + tl.load(row + _HEADER + unit % in_layer)  # in the pool
        frame = frames + tl.load(row) * frame_stride
        vector, has_vector, element, has_element = _tile(BLOCK_V, BLOCK_D, VECTORS, HEAD_DIM)
        frame_values = frame + unit * (VECTORS * HEAD_DIM) + element
        frame_exponents = frame + (units * HEAD_DIM + unit) * VECTORS + vector
        first = index * (VECTORS // HEADS * POOL_HEADS)  # vector of the pool
        place = first + _in_pool(vector, tl.load(row + 4), HEADS, POOL_HEADS)
        dimension = tl.arange(0, BLOCK_D)
        pool_values = stored + place[:, None] * HEAD_DIM + dimension[None, :]
        pool_exponents = exponents + place
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
):
    """Copy, decode or encode a tile, whose pointers and masks are given."""
    x = tl.load(source, mask=has_element, other=0)
    if SOURCE_FP8:
        biased = tl.load(source_exponents, mask=has_vector, other=0)
        if TARGET_FP8:
            tl.store(target_exponents, biased, mask=has_vector)
        else:
            scale = power_of_two(biased.to(tl.int32) + MIN_EXPONENT)
            x = unpack_e4m3(x) * scale[:, None]
    elif TARGET_FP8:
        x, exponent = round_rows(x.to(tl.float32))
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
