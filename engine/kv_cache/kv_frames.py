"""Frames of KV, as they lie in slots: where one is in a pool, views of its bytes, and what makes a
received one unusable. The layouts are those of ``kv_format.py``; pools and kernels use this module.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kv_cache import fp8_grid
from engine.kv_cache.kv_format import Codec, KVFormat, KVPiece
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import TransferFailed

MAX_KV_VALUE = 448.0 * 2.0**fp8_grid.MAX_EXPONENT
"""Largest magnitude in any pool, 57344. Larger values mean that a model is broken. Stored, they
would spread to the next sequence on the page, because masked values are still multiplied."""


class FrameDefect(enum.IntFlag):
    """What makes a received frame unusable. Kernels report the numbers."""

    SCALE = 1
    NAN_BYTE = 2
    VALUE = 4


NO_DEFECT = FrameDefect(0)

_DEFECTS = {
    FrameDefect.SCALE: f"scales beyond 2^{fp8_grid.MAX_EXPONENT}",
    FrameDefect.NAN_BYTE: "bytes that are not a number in e4m3 (0x7F, 0xFF)",
    FrameDefect.VALUE: f"values that are not finite, or beyond {MAX_KV_VALUE:g}",
}


def frame_refusal(defects: FrameDefect) -> TransferFailed:
    """Return the error for a frame with these defects, at least one."""
    return TransferFailed(
        "a frame holds " + ", and ".join(_DEFECTS[defect] for defect in FrameDefect(defects))
    )


class FrameCopy(NamedTuple):
    """One frame in a slot of staging memory on the pool's device, and where it is in the pool."""

    slot: int
    piece: KVPiece
    pages: Sequence[int]  # of the blocks of the piece
    codec: Codec


class PiecePlace(NamedTuple):
    """Where a piece lies in a pool, which makes it for one copy. A tensor of the pool is [layers,
    all units, unit_tokens, 2, kv_heads, ...] here."""

    layers: slice
    units: list[int]
    heads: slice

    def gather(self, pool: Tensor, out: Tensor) -> None:
        """Copy the piece to ``out`` [layers, units, unit_tokens, 2, heads, ...]."""
        index = torch.tensor(self.units, device=pool.device)
        torch.index_select(self._slice(pool), 1, index, out=out)

    def scatter(self, pool: Tensor, values: Tensor) -> None:
        """Copy ``values`` [layers, units, unit_tokens, 2, heads, ...] to their places."""
        target = self._slice(pool)
        if pool.device.type != "cpu":
            target.index_copy_(1, torch.tensor(self.units, device=pool.device), values)
            return
        # For 1 MiB these copies take 30 us, and index_copy_ 90 (fp32) to 770 us (bytes).
        for index, unit in enumerate(self.units):
            target[:, unit].copy_(values[:, index])

    def parts(self, values: Tensor) -> Iterator[tuple[PiecePlace, tuple[slice, slice]]]:
        """Divide ``values`` [layers, units, ...] into parts that stay in a core's cache. Yield the
        place of each part, and which layers and units of ``values`` it is."""
        layers, units = values.shape[:2]
        if values.device.type == "cpu":
            elements = max(1, values[0, 0].numel())  # of a unit
            units = min(units, max(1, fp8_grid.PORTION // elements))
            layers = min(layers, max(1, fp8_grid.PORTION // (units * elements)))
        for layer in range(0, values.shape[0], layers):
            for unit in range(0, values.shape[1], units):
                of = slice(layer, min(layer + layers, values.shape[0])), slice(unit, unit + units)
                first = self.layers.start
                in_pool = slice(first + of[0].start, first + of[0].stop)
                yield PiecePlace(in_pool, self.units[of[1]], self.heads), of

    def _slice(self, pool: Tensor) -> Tensor:
        return pool[self.layers, :, :, :, self.heads]


class WireView:
    """Views of the bytes of one piece on the wire, ``data`` [>= bytes] uint8."""

    def __init__(self, format_: KVFormat, piece: KVPiece, data: Tensor, dtype: torch.dtype) -> None:
        self._data, self._dtype = data, dtype
        units, tokens = piece.blocks * BLOCK_TOKENS // format_.unit_tokens, format_.unit_tokens
        heads = piece.heads or format_.model_heads
        self._shape = (piece.layers, units, tokens, 2, heads, format_.head_dim)
        self._count = math.prod(self._shape)

    @cached_property
    def values(self) -> Tensor:
        """[layers, units, unit_tokens, 2, heads, head_dim]"""
        data = self._data[: self._count * self._dtype.itemsize]
        return data.view(self._dtype).view(self._shape)

    @property
    def payload(self) -> Tensor:
        """[layers, units, unit_tokens, 2, heads, head_dim] uint8"""
        return self._data[: self._count].view(self._shape)

    @cached_property
    def exponents(self) -> Tensor:
        """[layers, units, unit_tokens, 2, heads] uint8"""
        end = self._count + self._count // self._shape[-1]
        return self._data[self._count : end].view(self._shape[:-1])

    def find_defects(self, codec: Codec) -> FrameDefect:
        """Return what is wrong with a received piece."""
        if codec is Codec.RAW:
            least, most = self.values.aminmax()  # without a temporary; both are NaN if any is
            in_range = float(least) >= -MAX_KV_VALUE and float(most) <= MAX_KV_VALUE
            return NO_DEFECT if in_range else FrameDefect.VALUE
        found = NO_DEFECT
        if int(self.exponents.max()) > fp8_grid.MAX_EXPONENT - fp8_grid.MIN_EXPONENT:
            found |= FrameDefect.SCALE
        # The largest signed byte is 0x7F and the largest unsigned one 0xFF: two reductions need no
        # temporary. For a frame of 1 MiB they take 40 us, and the copy into the pool 30 to 1300.
        payload = self._data[: self._count]
        largest_signed = int(payload.view(torch.int8).aminmax()[1])
        if largest_signed == 0x7F or int(payload.aminmax()[1]) == 0xFF:
            found |= FrameDefect.NAN_BYTE
        return found
