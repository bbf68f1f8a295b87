"""Draft nodes are shared fairly, use only free pages, and are limited per step."""

from __future__ import annotations

import random

import pytest

from engine.kv_cache.block_manager import BlockManager
from engine.scheduling.draft_pages import MAX_DRAFT_NODES, allocate_draft_pages, fair_shares
from engine.scheduling.sequence import Phase, Sequence, blocks_for
from tests.engine.conftest import request


@pytest.mark.parametrize(
    ("wanted", "most", "expected"),
    [
        ([4, 0, 4], 8, [4, 0, 4]),
        ([4, 4, 4], 7, [3, 2, 2]),
        ([1, 9, 2, 9], 9, [1, 3, 2, 3]),
        ([4, 9], 7, [4, 3]),
        ([8, 8, 8], 2, [1, 1, 0]),
        ([8], 0, [0]),
        ([], 5, []),
    ],
)
def test_fair_shares_of_examples(wanted: list[int], most: int, expected: list[int]) -> None:
    assert fair_shares(wanted, most) == expected


@pytest.mark.parametrize("seed", range(20))
def test_fair_shares_use_the_limit_and_are_equal_where_cut(seed: int) -> None:
    draw = random.Random(seed)
    wanted = [draw.randrange(17) for _ in range(draw.randrange(1, 80))]
    most = draw.randrange(300)
    got = fair_shares(wanted, most)
    assert sum(got) == min(most, sum(wanted))
    assert all(0 <= mine <= asked for mine, asked in zip(got, wanted, strict=True))
    cut = [mine for mine, asked in zip(got, wanted, strict=True) if mine < asked]
    assert all(mine >= max(got) - 1 for mine in cut)


def test_draft_nodes_of_a_step_are_limited() -> None:
    manager = BlockManager(400)
    running = [Sequence(i, request(f"{i}", [5] * 30), Phase.DECODE) for i in range(80)]
    for sequence in running:
        sequence.pages = manager.allocate(blocks_for(len(sequence.tokens)))
    room = running[0].request.length_limit - 31
    counts = allocate_draft_pages(manager, running, [1, -3, *[room + 99] * 78])
    assert sum(counts) == MAX_DRAFT_NODES and counts[:3] == (1, 0, 4)
    assert set(counts[2:]) == {3, 4}
    assert all(len(s.pages) == blocks_for(30 + n) for s, n in zip(running, counts, strict=True))
    assert allocate_draft_pages(manager, running[:2], [99, 2]) == (room, 2)
