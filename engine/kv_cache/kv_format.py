"""The formats of KV in a pool and on the wire, and the pieces that fit into one frame.

    raw   values in the model's type          [layers, blocks, page_tokens, 2, kv_heads, head_dim]
    fp8   e4m3 bytes of the same shape, then the exponents of their scales, one byte per token,
          K or V, and head                    [layers, blocks, page_tokens, 2, kv_heads]

Under the precision ``fp8`` both hold the same values (engine/kv_cache/fp8_grid.py). Pools, both
ends of a transfer and the planner use this module; it imports no torch.
"""

from __future__ import annotations

import enum
from typing import Literal, TypeAlias

import msgspec

from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import StartupError

Precision: TypeAlias = Literal["exact", "fp8"]
Storage: TypeAlias = Literal["wide", "fp8"]
StorageChoice: TypeAlias = Literal["auto", "wide", "fp8"]


class Codec(enum.IntEnum):
    """Encoding of a piece of KV on the wire. The numbers are those of the frame header."""

    RAW = 0
    FP8 = 1


class KVFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Precision, storage and sizes of the KV of one model in one pool."""

    precision: Precision
    storage: Storage
    layers: int
    kv_heads: int
    head_dim: int
    element_bytes: int  # of the model's type

    def __post_init__(self) -> None:
        if self.storage == "fp8" and self.precision == "exact":
            raise StartupError("a pool in fp8 would round what is to be exact: use precision fp8")

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Codecs that preserve every value of the pool."""
        return (Codec.RAW, Codec.FP8) if self.precision == "fp8" else (Codec.RAW,)

    def page_layer_bytes(self, codec: Codec) -> int:
        """Return the bytes of one page (K and V) in one layer."""
        vectors = BLOCK_TOKENS * 2 * self.kv_heads
        if codec is Codec.FP8:
            return vectors * (self.head_dim + 1)
        return vectors * self.head_dim * self.element_bytes

    @property
    def stored(self) -> Codec:
        """The codec whose bytes the pool stores."""
        return Codec.FP8 if self.storage == "fp8" else Codec.RAW

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token takes in all layers of the pool."""
        return self.layers * self.page_layer_bytes(self.stored) // BLOCK_TOKENS


class KVPiece(msgspec.Struct, frozen=True, array_like=True):
    """Layers ``layer .. layer + layers`` of blocks ``block .. block + blocks`` of one prompt, small
    enough for one frame."""

    layer: int
    layers: int
    block: int
    blocks: int

    def bytes(self, block_layer_bytes: int) -> int:
        return self.layers * self.blocks * block_layer_bytes


def split_into_pieces(
    first_block: int, end_block: int, layers: int, block_layer_bytes: int, frame_bytes: int
) -> list[KVPiece]:
    """Split blocks ``first_block .. end_block`` into pieces of at most ``frame_bytes``. A piece
    takes as many whole blocks (all layers) as fit; a block larger than a frame is split by layers.
    One layer of one block must fit."""
    assert 0 < block_layer_bytes <= frame_bytes
    whole = frame_bytes // (block_layer_bytes * layers)
    if whole:
        return [
            KVPiece(0, layers, block, min(whole, end_block - block))
            for block in range(first_block, end_block, whole)
        ]
    step = frame_bytes // block_layer_bytes
    return [
        KVPiece(layer, min(step, layers - layer), block, 1)
        for block in range(first_block, end_block)
        for layer in range(0, layers, step)
    ]
