"""How the KV of a prompt is cut into pieces that each fit one frame. Torch-free and pure."""

from __future__ import annotations

import msgspec


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
