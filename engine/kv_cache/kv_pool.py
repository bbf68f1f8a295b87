"""The paged KV pool of an engine, allocated once when the engine is loaded.

    wide   [layers, pages, page_tokens, 2 (K, V), kv_heads, head_dim] in the model's type
    fp8    e4m3 bytes of the same shape, and [layers, pages, page_tokens, 2, kv_heads] exponents

A page holds one block of the prefix cache (BLOCK_TOKENS tokens). Token ``t`` of page ``p`` is slot
``p * page_tokens + t`` in every layer. K and V of a token lie side by side, which is how the
projection returns them, so a step writes each layer's KV in one operation and gathers a page in
one copy. The block manager decides which sequence uses which page.

Under the precision ``fp8`` every write is rounded to the fp8 grid, also in a wide pool.
"""

from __future__ import annotations

import contextlib
import enum
import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.kv_cache import fp8_grid
from engine.kv_cache.kv_format import Codec, KVFormat, KVPiece
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import TransferFailed

MAX_KV_VALUE = 448.0 * 2.0**fp8_grid.MAX_EXPONENT
"""Largest magnitude in any pool, 57344. Larger values mean that a model is broken. Stored, they
would spread to the next sequence on the page, because masked values are still multiplied."""

_MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later; the mmap module does not define it."""


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
    pages: Sequence[int]  # [piece.blocks]
    codec: Codec


class LayerCache(Protocol):
    """One layer of a pool, which attention reads."""

    kv_heads: int
    page_bytes: int  # of a gathered page

    def gather(self, pages: Tensor) -> Tensor:
        """Return pages [n] as [n, page_tokens, 2, kv_heads, head_dim] in the model's type."""


class KVPool(ABC):
    """Storage of KV by page. It never frees a page; the next user overwrites it."""

    def __init__(self, format_: KVFormat, dtype: torch.dtype, device: torch.device) -> None:
        self.format = format_
        self.dtype = dtype  # of the model
        self._device = device
        self._layers: Sequence[LayerCache] = ()

    def layer(self, index: int) -> LayerCache:
        return self._layers[index]

    @abstractmethod
    def store(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Write kv [T, 2, kv_heads, head_dim] to ``slots`` [T]. Under ``fp8`` precision ``kv``
        is rounded in place, so that attention over it sees the values that the pool holds."""

    @abstractmethod
    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the KV in slots ``source`` [n] to slots ``target`` [n] in every layer. All slots are
        read before any is written."""

    def read(self, piece: KVPiece, pages: Sequence[int], out: Tensor, codec: Codec) -> int:
        """Copy ``piece`` into ``out`` [>= bytes] uint8 in the layout of ``kv_format.py`` and return
        the bytes written. ``pages`` [piece.blocks] are the pages of its blocks."""
        layers = slice(piece.layer, piece.layer + piece.layers)
        index = torch.tensor(pages, device=self._device)
        wire = _WireView(self.format, piece, out, self.dtype)
        if codec is Codec.FP8:
            payload, exponents = self._read_fp8(layers, index)
            wire.payload.copy_(payload)
            wire.exponents.copy_(exponents)
        else:
            wire.values.copy_(self._read_values(layers, index))
        return piece.bytes(self.format.page_layer_bytes(codec))

    def write(self, piece: KVPiece, pages: Sequence[int], data: Tensor, codec: Codec) -> None:
        """Copy ``data`` [bytes] uint8, in the layout of ``read``, into ``pages`` [piece.blocks].
        Raise TransferFailed for values that are not finite or too large (MAX_KV_VALUE)."""
        layers = slice(piece.layer, piece.layer + piece.layers)
        index = torch.tensor(pages, device=self._device)
        wire = _WireView(self.format, piece, data, self.dtype)
        if defects := wire.find_defects(codec):
            raise frame_refusal(defects)
        if codec is Codec.FP8:
            exponents = wire.exponents.to(self._device)
            self._write_fp8(layers, index, wire.payload.to(self._device), exponents)
        else:
            self._write_values(layers, index, wire.values.to(self._device))

    # In what follows, values and payload are [layers, n, page_tokens, 2, kv_heads, head_dim],
    # exponents are [layers, n, page_tokens, 2, kv_heads], and index is [n] pages.

    @abstractmethod
    def _read_values(self, layers: slice, index: Tensor) -> Tensor: ...

    @abstractmethod
    def _read_fp8(self, layers: slice, index: Tensor) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _write_values(self, layers: slice, index: Tensor, values: Tensor) -> None: ...

    @abstractmethod
    def _write_fp8(
        self, layers: slice, index: Tensor, payload: Tensor, exponents: Tensor
    ) -> None: ...


def make_pool(format_: KVFormat, pages: int, dtype: torch.dtype, device: torch.device) -> KVPool:
    """Return a pool of zeros."""
    if format_.storage == "fp8":
        return Fp8Pool(format_, pages, dtype, device)
    return WidePool(format_, pages, dtype, device)


class WidePool(KVPool):
    """A pool that stores values in the model's type, rounded or not."""

    def __init__(
        self, format_: KVFormat, pages: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(format_, dtype, device)
        self.tensor = _zeros(_shape(format_, pages), dtype, device)
        self._rounds = format_.precision == "fp8"
        self._by_slot = self.tensor.view(format_.layers, pages * BLOCK_TOKENS, -1).unbind()
        self._layers = [WideLayer(t) for t in self.tensor.unbind()]

    def store(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Write kv [T, 2, kv_heads, head_dim] to ``slots`` [T]."""
        if self._rounds:
            fp8_grid.round_to_grid_(kv)
        else:
            kv.nan_to_num_(nan=0.0).clamp_(-MAX_KV_VALUE, MAX_KV_VALUE)
        self._by_slot[layer].index_copy_(0, slots, kv.flatten(1))

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots ``source`` [n] to slots ``target`` [n]."""
        _move(self.tensor, source, target)

    def _read_values(self, layers: slice, index: Tensor) -> Tensor:
        return self.tensor[layers].index_select(1, index)

    def _read_fp8(self, layers: slice, index: Tensor) -> tuple[Tensor, Tensor]:
        return _encode(self._read_values(layers, index))

    def _write_values(self, layers: slice, index: Tensor, values: Tensor) -> None:
        if self._rounds:
            values = values.clone()  # the frame must not change
            fp8_grid.round_to_grid_(values.flatten(0, 2))
        self.tensor[layers].index_copy_(1, index, values)

    def _write_fp8(self, layers: slice, index: Tensor, payload: Tensor, exponents: Tensor) -> None:
        self.tensor[layers].index_copy_(1, index, _decode(payload, exponents, self.dtype))


class WideLayer:
    """A layer of a WidePool; ``pages`` is [pages, page_tokens, 2, kv_heads, head_dim]."""

    def __init__(self, pages: Tensor) -> None:
        self._pages = pages
        self.kv_heads = pages.shape[3]
        self.page_bytes = pages[0].numel() * pages.element_size()

    def gather(self, pages: Tensor) -> Tensor:
        """Return pages [n] as [n, page_tokens, 2, kv_heads, head_dim]."""
        return self._pages.index_select(0, pages)


class Fp8Pool(KVPool):
    """A pool that stores e4m3 bytes and exponents, in half the memory of bf16."""

    def __init__(
        self, format_: KVFormat, pages: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(format_, dtype, device)
        shape = _shape(format_, pages)
        self.payload = _zeros(shape, torch.uint8, device)
        self.exponents = _zeros(shape[:-1], torch.uint8, device)
        slots = pages * BLOCK_TOKENS
        self._payload_by_slot = self.payload.view(format_.layers, slots, -1).unbind()
        self._exponents_by_slot = self.exponents.view(format_.layers, slots, -1).unbind()
        self._layers = [
            Fp8Layer(p, e, dtype)
            for p, e in zip(self.payload.unbind(), self.exponents.unbind(), strict=True)
        ]

    def store(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Write kv [T, 2, kv_heads, head_dim] to ``slots`` [T]."""
        payload = torch.empty(kv.shape, dtype=torch.uint8, device=kv.device)
        exponents = torch.empty(kv.shape[:-1], dtype=torch.uint8, device=kv.device)
        fp8_grid.encode(kv, payload, exponents)
        fp8_grid.decode(payload, exponents, kv)
        self._payload_by_slot[layer].index_copy_(0, slots, payload.flatten(1))
        self._exponents_by_slot[layer].index_copy_(0, slots, exponents.flatten(1))

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots ``source`` [n] to slots ``target`` [n]."""
        _move(self.payload, source, target)
        _move(self.exponents, source, target)

    def _read_values(self, layers: slice, index: Tensor) -> Tensor:
        return _decode(*self._read_fp8(layers, index), self.dtype)

    def _read_fp8(self, layers: slice, index: Tensor) -> tuple[Tensor, Tensor]:
        payload = self.payload[layers].index_select(1, index)
        return payload, self.exponents[layers].index_select(1, index)

    def _write_values(self, layers: slice, index: Tensor, values: Tensor) -> None:
        self._write_fp8(layers, index, *_encode(values))

    def _write_fp8(self, layers: slice, index: Tensor, payload: Tensor, exponents: Tensor) -> None:
        self.payload[layers].index_copy_(1, index, payload)
        self.exponents[layers].index_copy_(1, index, exponents)


class Fp8Layer:
    """A layer of an Fp8Pool; ``payload`` is [pages, page_tokens, 2, kv_heads, head_dim]."""

    def __init__(self, payload: Tensor, exponents: Tensor, dtype: torch.dtype) -> None:
        self._payload, self._exponents, self._dtype = payload, exponents, dtype
        self.kv_heads = payload.shape[3]
        self.page_bytes = payload[0].numel() * dtype.itemsize

    def gather(self, pages: Tensor) -> Tensor:
        """Return pages [n] as [n, page_tokens, 2, kv_heads, head_dim]."""
        payload = self._payload.index_select(0, pages)
        exponents = self._exponents.index_select(0, pages)
        out = torch.empty(payload.shape, dtype=self._dtype, device=payload.device)
        fp8_grid.decode(payload, exponents, out)
        return out


class _WireView:
    """Views of the bytes of one piece on the wire, ``data`` [>= bytes] uint8."""

    def __init__(self, format_: KVFormat, piece: KVPiece, data: Tensor, dtype: torch.dtype) -> None:
        self._data, self._dtype = data, dtype
        self._shape = (piece.layers, piece.blocks, *_shape(format_, 0)[2:])
        self._count = math.prod(self._shape)

    @cached_property
    def values(self) -> Tensor:
        """[layers, blocks, page_tokens, 2, kv_heads, head_dim]"""
        data = self._data[: self._count * self._dtype.itemsize]
        return data.view(self._dtype).view(self._shape)

    @property
    def payload(self) -> Tensor:
        """[layers, blocks, page_tokens, 2, kv_heads, head_dim] uint8"""
        return self._data[: self._count].view(self._shape)

    @cached_property
    def exponents(self) -> Tensor:
        """[layers, blocks, page_tokens, 2, kv_heads] uint8"""
        end = self._count + self._count // self._shape[-1]
        return self._data[self._count : end].view(self._shape[:-1])

    def find_defects(self, codec: Codec) -> FrameDefect:
        """Return what is wrong with a received piece."""
        if codec is Codec.RAW:
            in_range = float(self.values.abs().max()) <= MAX_KV_VALUE  # false for NaN, too
            return NO_DEFECT if in_range else FrameDefect.VALUE
        found = NO_DEFECT
        if int(self.exponents.max()) > fp8_grid.MAX_EXPONENT - fp8_grid.MIN_EXPONENT:
            found |= FrameDefect.SCALE
        # The largest signed byte is 0x7F and the largest unsigned one 0xFF: two reductions need no
        # temporary. For a frame of 1 MiB they take 40 us, and the copy into the pool 700 to 1300.
        payload = self._data[: self._count]
        largest_signed = int(payload.view(torch.int8).aminmax()[1])
        if largest_signed == 0x7F or int(payload.aminmax()[1]) == 0xFF:
            found |= FrameDefect.NAN_BYTE
        return found


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros [*shape]. On the CPU the memory is populated now: page faults at the first write
    of each page cost single steps 40 ms, and a pool that does not fit fails at the start."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE)
    # Huge pages populate with a fraction of the page faults. Both calls are hints and may fail.
    for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
        with contextlib.suppress(OSError):
            memory.madvise(advice)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _shape(format_: KVFormat, pages: int) -> tuple[int, ...]:
    return (format_.layers, pages, BLOCK_TOKENS, 2, format_.kv_heads, format_.head_dim)


def _encode(values: Tensor) -> tuple[Tensor, Tensor]:
    payload = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    exponents = torch.empty(values.shape[:-1], dtype=torch.uint8, device=values.device)
    fp8_grid.encode(values.flatten(0, 2), payload.flatten(0, 2), exponents.flatten(0, 2))
    return payload, exponents


def _decode(payload: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    values = torch.empty(payload.shape, dtype=dtype, device=payload.device)
    fp8_grid.decode(payload.flatten(0, 2), exponents.flatten(0, 2), values.flatten(0, 2))
    return values


def _move(pool: Tensor, source: Tensor, target: Tensor) -> None:
    by_slot = pool.view(len(pool), -1, *pool.shape[3:])  # [layers, slots, ...]
    by_slot.index_copy_(1, target, by_slot.index_select(1, source))
