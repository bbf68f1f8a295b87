"""Sizes of pieces and pages, and how blocks and layers are divided among frames."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache.kv_format import Codec, KVFormat, KVPiece, split_into_pieces
from protocol.errors import StartupError, TransferFailed


def kv_format(**changes: Any) -> KVFormat:
    fields: dict[str, Any] = {
        "precision": "fp8",
        "storage": "wide",
        "layers": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "element_bytes": 4,
    }
    return KVFormat(**fields | changes)


def test_layers_of_a_block_are_cut_evenly() -> None:
    """32 layers with room for 15."""
    pieces = split_into_pieces(3, 5, 32, 100, 1500)
    assert [(p.layer, p.layers) for p in pieces] == [(0, 11), (11, 11), (22, 10)] * 2
    assert [p.block for p in pieces] == [3, 3, 3, 4, 4, 4]


def test_whole_blocks_are_cut_evenly() -> None:
    pieces = split_into_pieces(2, 12, 2, 100, 850)
    assert [(p.block, p.blocks) for p in pieces] == [(2, 4), (6, 3), (9, 3)]


@given(
    first=st.integers(0, 5),
    blocks=st.integers(0, 40),
    layers=st.integers(1, 90),
    size=st.integers(1, 50),
    frame=st.integers(50, 5000),
)
def test_pieces_cover_everything_once_in_the_fewest_and_equal_frames(
    first: int, blocks: int, layers: int, size: int, frame: int
) -> None:
    pieces = split_into_pieces(first, first + blocks, layers, size, frame, head=1, heads=2)
    covered = [
        (block, layer)
        for p in pieces
        for block in range(p.block, p.block + p.blocks)
        for layer in range(p.layer, p.layer + p.layers)
    ]
    assert len(covered) == len(set(covered)) == blocks * layers
    assert {b for b, _ in covered} == set(range(first, first + blocks))
    assert all(p.bytes(size) <= frame and (p.head, p.heads) == (1, 2) for p in pieces)
    whole = frame // (size * layers)
    if whole:
        assert len(pieces) == -(-blocks // whole)
    else:
        assert len(pieces) == blocks * -(-layers // (frame // size))
    sizes = [p.layers * p.blocks // (layers if whole else 1) for p in pieces] or [0]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("page_tokens", "piece", "pages", "units"),
    [
        (32, KVPiece(0, 1, 5, 2), [7, 3], [7, 3]),
        (16, KVPiece(0, 1, 5, 2), [7, 3, 9, 4], [7, 3, 9, 4]),
        (64, KVPiece(0, 1, 4, 1), [7], [14]),
        (64, KVPiece(0, 1, 5, 1), [7], [15]),
        (64, KVPiece(0, 1, 5, 4), [7, 3, 9], [15, 6, 7, 18]),
    ],
)
def test_units_of_blocks(
    page_tokens: int, piece: KVPiece, pages: list[int], units: list[int]
) -> None:
    assert kv_format(page_tokens=page_tokens).units_of(piece, pages) == units


def test_a_wrong_number_of_pages_is_a_defect() -> None:
    with pytest.raises(AssertionError):
        kv_format(page_tokens=64).units_of(KVPiece(0, 1, 5, 2), [7])


def test_heads_of_a_shard_are_counted_from_its_first_one() -> None:
    shard = kv_format(kv_heads=2, first_head=4, total_heads=8)
    assert shard.heads_of(KVPiece(0, 1, 0, 1, 5, 1)) == slice(1, 2)
    assert shard.heads_of(KVPiece(0, 1, 0, 1, 4, 2)) == slice(0, 2)
    for head, heads in ((0, 0), (3, 2), (5, 2), (6, 1), (0, 8)):
        with pytest.raises(TransferFailed, match="is not for a pool of 2 heads from head 4 on"):
            shard.heads_of(KVPiece(0, 1, 0, 1, head, heads))


def test_sizes_follow_from_heads_and_pages() -> None:
    shard = kv_format(first_head=2, total_heads=8, page_tokens=64)
    assert shard.block_layer_bytes(Codec.RAW) == 32 * 2 * 2 * 16 * 4
    assert shard.block_layer_bytes(Codec.FP8, heads=1) == 32 * 2 * 17
    assert shard.piece_bytes(KVPiece(0, 3, 0, 2), Codec.FP8) == 3 * 2 * 32 * 2 * 8 * 17
    assert shard.piece_bytes(KVPiece(0, 3, 0, 2, 2, 1), Codec.FP8) == 3 * 2 * 32 * 2 * 17
    assert shard.bytes_per_token == 4 * 2 * 2 * 16 * 4
    assert kv_format(page_tokens=16).bytes_per_token == shard.bytes_per_token


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"page_tokens": 24}, "multiple or a divisor of 32"),
        ({"page_tokens": 0}, "multiple or a divisor of 32"),
        ({"page_tokens": 48}, "multiple or a divisor of 32"),
        ({"first_head": 7, "total_heads": 8}, "not within the 8 heads"),
        ({"first_head": -1, "total_heads": 8}, "not within the 8 heads"),
        ({"first_head": 1}, "not within the 2 heads"),
    ],
)
def test_impossible_formats_are_refused(changes: dict[str, int], why: str) -> None:
    with pytest.raises(StartupError, match=why):
        kv_format(**changes)
