"""Which pieces of KV a shard of one model's KV heads asks from the shards that hold them.

    senders     heads 0 1 2 3 | 4 5 6 7            two shards of a model with eight KV heads
    receivers   0 1 | 2 3 | 4 5 | 6 7              four shards

Every receiver asks each sender for the heads that both hold: here one sender each. Layers and
blocks are cut by size as always. Page size and storage of the pools do not matter, because a
transfer counts blocks. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.kv_cache.kv_format import Codec, KVFormat, KVPiece, split_into_pieces
from protocol.errors import StartupError, TransferFailed


def make_shards(whole: KVFormat, shards: int) -> list[KVFormat]:
    """Return the formats of ``shards`` pools that divide the heads of ``whole`` equally.

    More shards than heads hold one head each, so that several hold the same one. Raise StartupError
    for a number of shards that neither divides the heads nor is a multiple of them."""
    heads = whole.kv_heads
    if shards < 1 or (heads % shards and shards % heads):
        raise StartupError(f"{heads} KV heads cannot be divided among {shards} shards equally")
    own = max(1, heads // shards)
    return [
        msgspec.structs.replace(
            whole, kv_heads=own, first_head=shard * heads // shards, total_heads=heads
        )
        for shard in range(shards)
    ]


def pieces_from_senders(
    receiver: KVFormat,
    senders: Sequence[KVFormat],
    first_block: int,
    end_block: int,
    codec: Codec,
    frame_bytes: int,
) -> list[list[KVPiece]]:
    """Return the pieces that the pool ``receiver`` asks from each sender for blocks ``first_block
    .. end_block``. Together they are each head of the receiver once; a head that several senders
    hold is asked from the first of them.

    Raise TransferFailed if the senders do not hold all heads, or are of another model.
    """
    for sender in senders:
        _check_same_model(receiver, sender)
    missing = set(range(receiver.first_head, receiver.first_head + receiver.kv_heads))
    asked = []
    for sender in senders:
        held = missing & set(range(sender.first_head, sender.first_head + sender.kv_heads))
        missing -= held
        asked.append(
            [
                piece
                for first, count in _runs(held)
                for piece in _pieces(
                    receiver, first, count, first_block, end_block, codec, frame_bytes
                )
            ]
        )
    if missing:
        raise TransferFailed(f"no sender holds the KV heads {sorted(missing)}")
    return asked


def _pieces(
    receiver: KVFormat,
    first: int,
    count: int,
    first_block: int,
    end_block: int,
    codec: Codec,
    frame_bytes: int,
) -> list[KVPiece]:
    size = receiver.block_layer_bytes(codec, count)
    whole = count == receiver.model_heads
    head, heads = (0, 0) if whole else (first, count)
    return split_into_pieces(
        first_block, end_block, receiver.layers, size, frame_bytes, head=head, heads=heads
    )


def _runs(heads: set[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive heads as (first, count)."""
    runs: list[tuple[int, int]] = []
    for head in sorted(heads):
        if runs and sum(runs[-1]) == head:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((head, 1))
    return runs


def _check_same_model(receiver: KVFormat, sender: KVFormat) -> None:
    def model(format_: KVFormat) -> tuple[object, ...]:
        heads, head_dim = format_.model_heads, format_.head_dim
        return format_.precision, format_.layers, heads, head_dim, format_.element_bytes

    if model(receiver) != model(sender):
        raise TransferFailed(
            "KV can be exchanged only with the same precision, layers, heads, head size and element"
            f" size: {model(receiver)} here, {model(sender)} there"
        )
