"""The formats of KV in a pool and on the wire, and the pieces that fit into one frame.

    raw   values in the model's type          [layers, blocks, BLOCK_TOKENS, 2, heads, head_dim]
    fp8   e4m3 bytes of the same shape, then the exponents of their scales, one byte per token,
          K or V, and head                    [layers, blocks, BLOCK_TOKENS, 2, heads]

Under the precision ``fp8`` both hold the same values (engine/kv_cache/fp8_grid.py). Pools, both
ends of a transfer and the planner use this module; it imports no torch.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import StartupError, TransferFailed

Precision: TypeAlias = Literal["exact", "fp8"]
Storage: TypeAlias = Literal["wide", "fp8"]
StorageChoice: TypeAlias = Literal["auto", "wide", "fp8"]

LAYOUT_VERSION = 2
"""Version of the bytes of a piece. Workers with different ones do not exchange KV."""


class Codec(enum.IntEnum):
    """Encoding of a piece of KV on the wire. The numbers are those of the frame header."""

    RAW = 0
    FP8 = 1


class KVFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Precision, storage and sizes of the KV of one model in one pool.

    A pool holds all KV heads of the model, or those of one shard: ``kv_heads`` heads from
    ``first_head`` on, of ``total_heads``. The number of tokens in a page is a multiple or a divisor
    of BLOCK_TOKENS and stays within the pool: transfers count blocks.
    """

    precision: Precision
    storage: Storage
    layers: int
    kv_heads: int  # in this pool
    head_dim: int
    element_bytes: int  # of the model's type
    first_head: int = 0
    total_heads: int = 0  # of the model; 0: kv_heads
    page_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        if self.storage == "fp8" and self.precision == "exact":
            raise StartupError("a pool in fp8 would round what is to be exact: use precision fp8")
        if self.page_tokens < 1 or (
            self.page_tokens % BLOCK_TOKENS and BLOCK_TOKENS % self.page_tokens
        ):
            raise StartupError(
                f"pages of {self.page_tokens} tokens: a multiple or a divisor of {BLOCK_TOKENS} is"
                " needed"
            )
        if not 0 <= self.first_head <= self.model_heads - self.kv_heads:
            raise StartupError(
                f"a pool of {self.kv_heads} heads from head {self.first_head} on is not within the"
                f" {self.model_heads} heads of the model"
            )

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Codecs that preserve every value of the pool."""
        return (Codec.RAW, Codec.FP8) if self.precision == "fp8" else (Codec.RAW,)

    @property
    def model_heads(self) -> int:
        """KV heads of the model in all shards."""
        return self.total_heads or self.kv_heads

    def block_layer_bytes(self, codec: Codec, heads: int = 0) -> int:
        """Return the bytes of one block (K and V) in one layer, with ``heads`` heads; 0: all heads
        of this pool."""
        vectors = BLOCK_TOKENS * 2 * (heads or self.kv_heads)
        if codec is Codec.FP8:
            return vectors * (self.head_dim + 1)
        return vectors * self.head_dim * self.element_bytes

    def piece_bytes(self, piece: KVPiece, codec: Codec) -> int:
        """Return the bytes of ``piece`` on the wire."""
        return piece.bytes(self.block_layer_bytes(codec, piece.heads or self.model_heads))

    @property
    def unit_tokens(self) -> int:
        """Tokens of a unit, the smaller one of a page and a block. The units of a pool are numbered
        like its pages: unit ``u`` begins at slot ``u * unit_tokens`` of every layer."""
        return min(self.page_tokens, BLOCK_TOKENS)

    def units_of(self, piece: KVPiece, pages: Sequence[int]) -> list[int]:
        """Return the units of the blocks of ``piece``, in order. ``pages`` are the pages that hold
        these blocks, in order: one for each block or unit, or one for several blocks."""
        in_page = self.page_tokens // self.unit_tokens
        first = piece.block % in_page
        count = piece.blocks * (BLOCK_TOKENS // self.unit_tokens)
        assert len(pages) == -(-(first + count) // in_page), (piece, len(pages))
        return [
            pages[index // in_page] * in_page + index % in_page
            for index in range(first, first + count)
        ]

    def heads_of(self, piece: KVPiece) -> slice:
        """Return which heads of this pool are those of ``piece``. Raise TransferFailed if the pool
        does not hold all of them."""
        first = piece.head - self.first_head
        count = piece.heads or self.model_heads
        if not 0 <= first <= self.kv_heads - count:
            raise TransferFailed(
                f"a frame with {count} heads from head {piece.head} on is not for a pool of"
                f" {self.kv_heads} heads from head {self.first_head} on"
            )
        return slice(first, first + count)

    @property
    def stored(self) -> Codec:
        """The codec whose bytes the pool stores."""
        return Codec.FP8 if self.storage == "fp8" else Codec.RAW

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token takes in all layers of the pool."""
        return self.layers * self.block_layer_bytes(self.stored) // BLOCK_TOKENS


class KVPiece(msgspec.Struct, frozen=True, array_like=True):
    """Layers ``layer .. layer + layers`` of blocks ``block .. block + blocks`` of one prompt, with
    heads ``head .. head + heads`` of the model, small enough for one frame. ``heads`` 0 stands for
    all heads of the model, and ``head`` is 0 then."""

    layer: int
    layers: int
    block: int
    blocks: int
    head: int = 0
    heads: int = 0

    def bytes(self, block_layer_bytes: int) -> int:
        """Return the bytes of this piece. ``block_layer_bytes`` are those of its heads."""
        return self.layers * self.blocks * block_layer_bytes


def split_into_pieces(
    first_block: int,
    end_block: int,
    layers: int,
    block_layer_bytes: int,
    frame_bytes: int,
    *,
    head: int = 0,
    heads: int = 0,
) -> list[KVPiece]:
    """Split blocks ``first_block .. end_block`` into pieces of at most ``frame_bytes``, as few and
    as equal as possible: a small last frame would cost as much as a full one.

    A piece takes whole blocks (all layers) where one fits; a block larger than a frame is split by
    layers. ``head`` and ``heads`` are those of each piece, and ``block_layer_bytes`` the bytes of
    these heads. One layer of one block must fit.
    """
    assert 0 < block_layer_bytes <= frame_bytes
    whole = frame_bytes // (block_layer_bytes * layers)
    if whole:
        return [
            KVPiece(0, layers, block, blocks, head, heads)
            for block, blocks in _equal_parts(first_block, end_block, whole)
        ]
    parts = _equal_parts(0, layers, frame_bytes // block_layer_bytes)
    return [
        KVPiece(layer, count, block, 1, head, heads)
        for block in range(first_block, end_block)
        for layer, count in parts
    ]


def _equal_parts(first: int, end: int, most: int) -> list[tuple[int, int]]:
    """Divide ``first .. end`` into the fewest (start, length) of at most ``most``, whose lengths
    differ by one at most, the longest first."""
    total = max(0, end - first)
    count = -(-total // most)
    parts, start = [], first
    for index in range(count):
        length = total // count + (index < total % count)
        parts.append((start, length))
        start += length
    return parts
