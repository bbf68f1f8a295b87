"""How KV looks in a pool and on the wire. Torch-free.

    raw   values in the model's type          [layers, blocks, page_tokens, 2, kv_heads, head_dim]
    fp8   e4m3 bytes of the same shape, then the exponents of their scales, one byte for each
          token, K or V, and head              [layers, blocks, page_tokens, 2, kv_heads]

Under the precision ``fp8`` both hold the same values (engine/kv_cache/fp8_grid.py).
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
    """What a piece of KV is turned into for the wire. The numbers are those of a frame."""

    RAW = 0
    FP8 = 1


class KVFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the KV of one model in one pool."""

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
        """Codecs that change no value."""
        return (Codec.RAW, Codec.FP8) if self.precision == "fp8" else (Codec.RAW,)

    def page_layer_bytes(self, codec: Codec) -> int:
        """Bytes of one page (K and V) in one layer."""
        vectors = BLOCK_TOKENS * 2 * self.kv_heads
        if codec is Codec.FP8:
            return vectors * (self.head_dim + 1)
        return vectors * self.head_dim * self.element_bytes

    @property
    def stored(self) -> Codec:
        """The codec whose bytes the pool holds."""
        return Codec.FP8 if self.storage == "fp8" else Codec.RAW

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the pool that a token takes in all layers."""
        return self.layers * self.page_layer_bytes(self.stored) // BLOCK_TOKENS


# MERGED engine.pieces
# How the KV of a prompt is cut into pieces that each fit one frame. Torch-free and pure.


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Layers ``layer .. layer + layers`` of blocks ``block .. block + blocks`` of one prompt."""

    layer: int
    layers: int
    block: int
    blocks: int

    def bytes(self, block_layer_bytes: int) -> int:
        return self.layers * self.blocks * block_layer_bytes


def cut(
    first_block: int, end_block: int, layers: int, block_layer_bytes: int, frame_bytes: int
) -> list[Piece]:
    """Cut blocks ``first_block .. end_block`` into pieces of at most ``frame_bytes``.

    Whole blocks (all layers) go together while they fit; a block larger than a frame is cut by
    layers. One layer of one block must fit.
    """
    assert 0 < block_layer_bytes <= frame_bytes
    whole = frame_bytes // (block_layer_bytes * layers)
    if whole:
        return [
            Piece(0, layers, block, min(whole, end_block - block))
            for block in range(first_block, end_block, whole)
        ]
    step = frame_bytes // block_layer_bytes
    return [
        Piece(layer, min(step, layers - layer), block, 1)
        for block in range(first_block, end_block)
        for layer in range(0, layers, step)
    ]
