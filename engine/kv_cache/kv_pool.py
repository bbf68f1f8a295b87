"""The paged KV pool: allocated once.

    wide   [layers, pages, page_tokens, 2 (K, V), kv_heads, head_dim] in the model's type
    fp8    the same as e4m3 bytes, and [layers, pages, page_tokens, 2, kv_heads] exponents

A page holds one block of the prefix cache (BLOCK_TOKENS tokens). Token ``t`` of page ``p`` is slot
``p * page_tokens + t`` in every layer. K and V of a token lie side by side, as the projection
leaves them, so that a step writes each layer's KV in one operation and gathers a page in one copy.
Who may use which page is the block manager's business.

Under the precision ``fp8`` every write is rounded to the fp8 grid, whatever the pool is made of.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.kv_cache import fp8_grid
from engine.kv_cache.kv_format import Codec, KVFormat, Piece
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import TransferFailed

LARGEST = 448.0 * 2.0**fp8_grid.MAX_EXPONENT
"""Largest value in any pool, 57344. A model that exceeds it has gone astray; kept, its KV would
spoil the attention of whoever gets the page next, because masked values are still multiplied."""

_MADV_POPULATE_WRITE = 23
"""Of Linux 5.14; the mmap module does not name it."""


class LayerCache(Protocol):
    """One layer of a pool, as attention reads it."""

    kv_heads: int
    page_bytes: int  # of a gathered page

    def gather(self, pages: Tensor) -> Tensor:
        """Pages [n] as [n, page_tokens, 2, kv_heads, head_dim] in the model's type."""


class KVPool(Protocol):
    """Storage of KV by page. Frees nothing: pages are only overwritten."""

    format: KVFormat

    def layer(self, index: int) -> LayerCache: ...

    def store(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Write kv [T, 2, kv_heads, head_dim] to ``slots`` [T]. Under ``fp8`` precision ``kv``
        itself is rounded, so that whoever attends to it sees what the pool holds."""

    def read(self, piece: Piece, pages: Sequence[int], out: Tensor, codec: Codec) -> int:
        """Copy ``piece`` into ``out`` (uint8, long enough); returns the bytes written. ``pages``
        are the pages of the blocks ``piece.blocks``; the layout is that of ``kv_format.py``."""

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the KV in slots ``source`` [n] to ``target`` [n], in every layer; all are read
        before any is written."""

    def write(self, piece: Piece, pages: Sequence[int], data: Tensor, codec: Codec) -> None:
        """Copy ``data`` (uint8, in the layout of ``read``) into ``pages``. Raises TransferFailed
        for what is no finite KV: it would spread to whoever gets the page next."""


def make_pool(format_: KVFormat, pages: int, dtype: torch.dtype, device: torch.device) -> KVPool:
    """A pool of zeros."""
    if format_.storage == "fp8":
        return Fp8Pool(format_, pages, dtype, device)
    return WidePool(format_, pages, dtype, device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On the CPU their memory is taken now: handed out when a page is first written, as the
    system does it otherwise, it cost single steps 40 ms; and what does not fit fails at the start.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE)
    # Large pages: taking the pool costs a fraction of the page faults. Both are hints.
    for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
        with contextlib.suppress(OSError):
            memory.madvise(advice)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _shape(format_: KVFormat, pages: int) -> tuple[int, ...]:
    return (format_.layers, pages, BLOCK_TOKENS, 2, format_.kv_heads, format_.head_dim)


class _Wire:
    """The bytes of one piece, as views."""

    def __init__(self, format_: KVFormat, piece: Piece, data: Tensor, dtype: torch.dtype) -> None:
        shape = (piece.layers, piece.blocks, *_shape(format_, 0)[2:])
        values = math.prod(shape)
        vectors = values // format_.head_dim
        self._data, self._dtype, self._shape = data, dtype, shape
        self._values, self._vectors = values, vectors

    def raw(self) -> Tensor:
        count = self._values * self._dtype.itemsize
        return self._data[:count].view(self._dtype).view(self._shape)

    def payload(self) -> Tensor:
        return self._data[: self._values].view(self._shape)

    def exponents(self) -> Tensor:
        end = self._values + self._vectors
        return self._data[self._values : end].view(self._shape[:-1])


class WidePool:
    """Values in the model's type."""

    def __init__(
        self, format_: KVFormat, pages: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.format = format_
        self.tensor = _zeros(_shape(format_, pages), dtype, device)
        self._rounds = format_.precision == "fp8"
        by_slot = self.tensor.view(format_.layers, pages * BLOCK_TOKENS, -1)
        self._by_slot = by_slot.unbind()
        self._layers = [WideLayer(t) for t in self.tensor.unbind()]

    def layer(self, index: int) -> LayerCache:
        return self._layers[index]

    def store(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        if self._rounds:
            fp8_grid.round_(kv)
        else:
            kv.nan_to_num_(nan=0.0).clamp_(-LARGEST, LARGEST)
        self._by_slot[layer].index_copy_(0, slots, kv.flatten(1))

    def move(self, source: Tensor, target: Tensor) -> None:
        _move(self.tensor, source, target)

    def read(self, piece: Piece, pages: Sequence[int], out: Tensor, codec: Codec) -> int:
        source = self.tensor[piece.layer : piece.layer + piece.layers]
        found = source.index_select(1, torch.tensor(pages, device=source.device))
        wire = _Wire(self.format, piece, out, self.tensor.dtype)
        if codec is Codec.FP8:
            payload = torch.empty_like(found, dtype=torch.uint8)
            exponents = torch.empty_like(payload[..., 0])
            fp8_grid.encode(found.flatten(0, 2), payload.flatten(0, 2), exponents.flatten(0, 2))
            wire.payload().copy_(payload)
            wire.exponents().copy_(exponents)
        else:
            wire.raw().copy_(found)
        return piece.bytes(self.format.page_layer_bytes(codec))

    def write(self, piece: Piece, pages: Sequence[int], data: Tensor, codec: Codec) -> None:
        wire = _Wire(self.format, piece, data, self.tensor.dtype)
        target = self.tensor[piece.layer : piece.layer + piece.layers]
        device = target.device
        if codec is Codec.FP8:
            payload, exponents = wire.payload().to(device), wire.exponents().to(device)
            _check_exponents(exponents)
            source = torch.empty(payload.shape, dtype=target.dtype, device=device)
            fp8_grid.decode(payload.flatten(0, 2), exponents.flatten(0, 2), source.flatten(0, 2))
        else:
            source = wire.raw().to(device)
            _check_range(source)
            if self._rounds:
                source = source.clone()  # the frame itself stays as it came
                fp8_grid.round_(source.flatten(0, 2))
        target.index_copy_(1, torch.tensor(pages, device=device), source)


class WideLayer:
    def __init__(self, pages: Tensor) -> None:
        self._pages = pages
        self.kv_heads = pages.shape[3]
        self.page_bytes = pages[0].numel() * pages.element_size()

    def gather(self, pages: Tensor) -> Tensor:
        return self._pages.index_select(0, pages)


class Fp8Pool:
    """e4m3 bytes and exponents: half the memory of bf16."""

    def __init__(
        self, format_: KVFormat, pages: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.format = format_
        self._dtype = dtype
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

    def layer(self, index: int) -> LayerCache:
        return self._layers[index]

    def store(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        payload = torch.empty(kv.shape, dtype=torch.uint8, device=kv.device)
        exponents = torch.empty(kv.shape[:-1], dtype=torch.uint8, device=kv.device)
        fp8_grid.encode(kv, payload, exponents)
        fp8_grid.decode(payload, exponents, kv)
        self._payload_by_slot[layer].index_copy_(0, slots, payload.flatten(1))
        self._exponents_by_slot[layer].index_copy_(0, slots, exponents.flatten(1))

    def move(self, source: Tensor, target: Tensor) -> None:
        _move(self.payload, source, target)
        _move(self.exponents, source, target)

    def read(self, piece: Piece, pages: Sequence[int], out: Tensor, codec: Codec) -> int:
        at = slice(piece.layer, piece.layer + piece.layers)
        index = torch.tensor(pages, device=self.payload.device)
        payload = self.payload[at].index_select(1, index)
        exponents = self.exponents[at].index_select(1, index)
        wire = _Wire(self.format, piece, out, self._dtype)
        if codec is Codec.FP8:
            wire.payload().copy_(payload)
            wire.exponents().copy_(exponents)
        else:
            raw = torch.empty(payload.shape, dtype=self._dtype, device=payload.device)
            fp8_grid.decode(payload.flatten(0, 2), exponents.flatten(0, 2), raw.flatten(0, 2))
            wire.raw().copy_(raw)
        return piece.bytes(self.format.page_layer_bytes(codec))

    def write(self, piece: Piece, pages: Sequence[int], data: Tensor, codec: Codec) -> None:
        at = slice(piece.layer, piece.layer + piece.layers)
        device = self.payload.device
        index = torch.tensor(pages, device=device)
        wire = _Wire(self.format, piece, data, self._dtype)
        if codec is Codec.FP8:
            payload, exponents = wire.payload().to(device), wire.exponents().to(device)
            _check_exponents(exponents)
        else:
            raw = wire.raw().to(device)
            _check_range(raw)
            payload = torch.empty(raw.shape, dtype=torch.uint8, device=device)
            exponents = torch.empty(raw.shape[:-1], dtype=torch.uint8, device=device)
            fp8_grid.encode(raw.flatten(0, 2), payload.flatten(0, 2), exponents.flatten(0, 2))
        self.payload[at].index_copy_(1, index, payload)
        self.exponents[at].index_copy_(1, index, exponents)


class Fp8Layer:
    def __init__(self, payload: Tensor, exponents: Tensor, dtype: torch.dtype) -> None:
        self._payload, self._exponents, self._dtype = payload, exponents, dtype
        self.kv_heads = payload.shape[3]
        self.page_bytes = payload[0].numel() * dtype.itemsize

    def gather(self, pages: Tensor) -> Tensor:
        payload = self._payload.index_select(0, pages)
        exponents = self._exponents.index_select(0, pages)
        out = torch.empty(payload.shape, dtype=self._dtype, device=payload.device)
        fp8_grid.decode(payload, exponents, out)
        return out


def _move(pool: Tensor, source: Tensor, target: Tensor) -> None:
    by_slot = pool.view(len(pool), -1, *pool.shape[3:])  # [layers, slots, ...]
    by_slot.index_copy_(1, target, by_slot.index_select(1, source))


def _check_range(values: Tensor) -> None:
    if not float(values.abs().max()) <= LARGEST:  # nor is NaN
        raise TransferFailed(f"a frame holds values that are not finite, or beyond {LARGEST:g}")


def _check_exponents(exponents: Tensor) -> None:
    largest = fp8_grid.MAX_EXPONENT - fp8_grid.MIN_EXPONENT
    if int(exponents.max()) > largest:
        raise TransferFailed(f"a frame holds scales beyond 2^{fp8_grid.MAX_EXPONENT}")
