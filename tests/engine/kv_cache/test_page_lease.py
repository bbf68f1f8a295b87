"""Leased pages: what may be written, and which leading blocks are complete."""

from __future__ import annotations

import random

import pytest

from engine.kv_cache.kv_format import KVFormat, KVPiece, split_into_pieces
from engine.kv_cache.page_lease import PageLease

KV = KVFormat(precision="exact", storage="wide", layers=4, kv_heads=2, head_dim=8, element_bytes=2)
PAGES = [11, 12, 13, 14, 15]


def write(lease: PageLease, piece: KVPiece, kv: KVFormat = KV) -> None:
    with lease.pages(piece) as pages:
        assert pages is not None
        lease.record(piece, kv)


def test_pages_are_those_of_the_piece_until_the_lease_is_revoked() -> None:
    lease = PageLease(1, PAGES, 1)
    with lease.pages(KVPiece(0, 4, 2, 2)) as pages:
        assert pages == [13, 14]
    lease.revoke()
    lease.revoke()
    with lease.pages(KVPiece(0, 4, 2, 2)) as pages:
        assert pages is None


@pytest.mark.parametrize(("block", "blocks"), [(0, 1), (4, 2), (-1, 1), (5, 1), (2, 0), (3, -1)])
def test_only_blocks_that_are_missing_and_have_pages_are_covered(block: int, blocks: int) -> None:
    lease = PageLease(1, PAGES, 1)
    assert lease.covers(KVPiece(0, 4, 1, 4))
    assert not lease.covers(KVPiece(0, 4, block, blocks))


@pytest.mark.parametrize("seed", range(5))
def test_leading_blocks_are_complete_when_all_their_layers_are_written(seed: int) -> None:
    lease = PageLease(1, PAGES, 1)
    pieces = split_into_pieces(1, 5, KV.layers, 10, 20)  # two layers of a block in each
    random.Random(seed).shuffle(pieces)
    for count, piece in enumerate(pieces, 1):
        write(lease, piece)
        written = {(p.block, p.layer) for p in pieces[:count]}
        expected = 1
        while {(expected, 0), (expected, 2)} <= written:
            expected += 1
        assert lease.complete_blocks() == expected and lease.frames == count
    assert lease.complete_blocks() == 5


def test_blocks_of_a_shard_are_complete_with_its_own_heads() -> None:
    shard = KVFormat(
        **{name: getattr(KV, name) for name in ("precision", "storage", "layers", "kv_heads")},
        head_dim=8,
        element_bytes=2,
        first_head=2,
        total_heads=8,
    )
    lease = PageLease(1, PAGES, 0)
    write(lease, KVPiece(0, 4, 0, 1, 0, 3), shard)  # heads 0, 1 and 2
    assert lease.complete_blocks() == 0
    write(lease, KVPiece(0, 4, 0, 1, 3, 5), shard)
    assert lease.complete_blocks() == 1
    write(lease, KVPiece(0, 4, 1, 1), shard)  # all heads
    assert lease.complete_blocks() == 2
