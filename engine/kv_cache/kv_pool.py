"""The paged KV pool of an engine, allocated once when the engine is loaded.

    wide   [layers, pages, page_tokens, 2 (K, V), kv_heads, head_dim] in the model's type
    fp8    e4m3 bytes of the same shape, and [layers, pages, page_tokens, 2, kv_heads] exponents

In an engine a page holds one block of the prefix cache (BLOCK_TOKENS tokens). Token ``t`` of page
``p`` is slot ``p * page_tokens + t`` in every layer. K and V of a token lie side by side, which is
how the projection returns them, so a step writes each layer's KV in one operation and gathers a
page in one copy. The block manager decides which sequence uses which page.

Frames are copied by unit: a page, or a block where pages are larger than blocks.

Under the precision ``fp8`` every value is on the fp8 grid, also in a wide pool: what a step stores
is rounded, and so is what a frame of another worker was read from.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.kv_cache import fp8_grid
from engine.kv_cache.kv_format import Codec, KVFormat, KVPiece
from engine.kv_cache.kv_frames import MAX_KV_VALUE, PiecePlace, WireView, frame_refusal

_MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later; the mmap module does not define it."""


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
        self.device = device
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
        the bytes written. ``pages`` are those that hold its blocks (``KVFormat.units_of``)."""
        nbytes = self.format.piece_bytes(piece, codec)
        place = self._place(piece, pages)
        near = out.device == self.device
        target = out if near else torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        wire = WireView(self.format, piece, target, self.dtype)
        if codec is Codec.FP8:
            self._read_fp8(place, wire.payload, wire.exponents)
        else:
            self._read_values(place, wire.values)
        if not near:
            out[:nbytes].copy_(target)
        return nbytes

    def write(self, piece: KVPiece, pages: Sequence[int], data: Tensor, codec: Codec) -> None:
        """Copy ``data`` [bytes] uint8, in the layout of ``read``, into the pool.

        Raise TransferFailed for values that are not finite or too large (MAX_KV_VALUE).

        A wide pool takes raw values as they are, because the sender's pool has rounded them. Values
        off the fp8 grid can only come from a sender that breaks the protocol. They are finite, so
        they affect the same sequences as wrong values on the grid, which no check finds: the one
        that is received, and those that share its cached blocks.
        """
        place = self._place(piece, pages)
        wire = WireView(self.format, piece, data.to(self.device), self.dtype)
        if defects := wire.find_defects(codec):
            raise frame_refusal(defects)
        if codec is Codec.FP8:
            self._write_fp8(place, wire.payload, wire.exponents)
        else:
            self._write_values(place, wire.values)

    def _place(self, piece: KVPiece, pages: Sequence[int]) -> PiecePlace:
        return PiecePlace(
            slice(piece.layer, piece.layer + piece.layers),
            self.format.units_of(piece, pages),
            self.format.heads_of(piece),
        )

    # In what follows, values and payload are [layers, units, unit_tokens, 2, heads, head_dim], and
    # exponents are [layers, units, unit_tokens, 2, heads]: views of a frame.

    @abstractmethod
    def _read_values(self, place: PiecePlace, values: Tensor) -> None: ...

    @abstractmethod
    def _read_fp8(self, place: PiecePlace, payload: Tensor, exponents: Tensor) -> None: ...

    @abstractmethod
    def _write_values(self, place: PiecePlace, values: Tensor) -> None: ...

    @abstractmethod
    def _write_fp8(self, place: PiecePlace, payload: Tensor, exponents: Tensor) -> None: ...


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
        self._by_unit = _by_unit(self.tensor, format_)
        self._by_slot = self.tensor.view(format_.layers, pages * format_.page_tokens, -1).unbind()
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

    def _read_values(self, place: PiecePlace, values: Tensor) -> None:
        place.gather(self._by_unit, values)

    def _read_fp8(self, place: PiecePlace, payload: Tensor, exponents: Tensor) -> None:
        for part, of in place.parts(payload):
            values = torch.empty(payload[of].shape, dtype=self.dtype, device=self.device)
            part.gather(self._by_unit, values)
            fp8_grid.encode(values, payload[of], exponents[of])

    def _write_values(self, place: PiecePlace, values: Tensor) -> None:
        place.scatter(self._by_unit, values)

    def _write_fp8(self, place: PiecePlace, payload: Tensor, exponents: Tensor) -> None:
        for part, of in place.parts(payload):
            values = torch.empty(payload[of].shape, dtype=self.dtype, device=self.device)
            fp8_grid.decode(payload[of], exponents[of], values)
            part.scatter(self._by_unit, values)


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
        self._payload_by_unit = _by_unit(self.payload, format_)
        self._exponents_by_unit = _by_unit(self.exponents, format_)
        slots = pages * format_.page_tokens
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

    def _read_values(self, place: PiecePlace, values: Tensor) -> None:
        for part, of in place.parts(values):
            payload, exponents = _empty_fp8(values[of])
            part.gather(self._payload_by_unit, payload)
            part.gather(self._exponents_by_unit, exponents)
            fp8_grid.decode(payload, exponents, values[of])

    def _read_fp8(self, place: PiecePlace, payload: Tensor, exponents: Tensor) -> None:
        place.gather(self._payload_by_unit, payload)
        place.gather(self._exponents_by_unit, exponents)

    def _write_values(self, place: PiecePlace, values: Tensor) -> None:
        for part, of in place.parts(values):
            payload, exponents = _empty_fp8(values[of])
            fp8_grid.encode(values[of], payload, exponents)
            self._write_fp8(part, payload, exponents)

    def _write_fp8(self, place: PiecePlace, payload: Tensor, exponents: Tensor) -> None:
        place.scatter(self._payload_by_unit, payload)
        place.scatter(self._exponents_by_unit, exponents)


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
    return (format_.layers, pages, format_.page_tokens, 2, format_.kv_heads, format_.head_dim)


def _by_unit(pool: Tensor, format_: KVFormat) -> Tensor:
    """View ``pool`` [layers, pages, page_tokens, 2, kv_heads, ...] as [layers, units, unit_tokens,
    2, kv_heads, ...]."""
    return pool.view(format_.layers, -1, format_.unit_tokens, *pool.shape[3:])


def _empty_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return payload [...] and exponents [...] for ``values`` [..., head_dim]."""
    shape, device = values.shape, values.device
    payload = torch.empty(shape, dtype=torch.uint8, device=device)
    return payload, torch.empty(shape[:-1], dtype=torch.uint8, device=device)


def _move(pool: Tensor, source: Tensor, target: Tensor) -> None:
    by_slot = pool.view(len(pool), -1, *pool.shape[3:])  # [layers, slots, ...]
    by_slot.index_copy_(1, target, by_slot.index_select(1, source))
