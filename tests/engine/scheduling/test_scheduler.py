"""The scheduler never deadlocks or starves a sequence; parents of cached blocks stay cached."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.execution.engine import Engine
from engine.kv_cache.kv_format import KVPiece, split_into_pieces
from protocol.block_keys import block_keys
from tests.engine.conftest import ROOT, drain, request


def covers(pieces: list[KVPiece], first: int, end: int, layers: int) -> bool:
    """Whether ``pieces`` hold every (layer, block) of the range exactly once."""
    cells = [
        (layer, block)
        for p in pieces
        for layer in range(p.layer, p.layer + p.layers)
        for block in range(p.block, p.block + p.blocks)
    ]
    return sorted(cells) == [(lay, b) for lay in range(layers) for b in range(first, end)]


@given(
    first=st.integers(0, 20),
    blocks=st.integers(0, 20),
    layers=st.integers(1, 12),
    size=st.integers(1, 64),
    room=st.integers(64, 4096),
)
def test_pieces_cover_all_blocks_and_fit_into_frames(
    first: int, blocks: int, layers: int, size: int, room: int
) -> None:
    pieces = split_into_pieces(first, first + blocks, layers, size, room)
    assert covers(pieces, first, first + blocks, layers)
    assert all(p.bytes(size) <= room for p in pieces)


def test_two_receives_that_share_prefixes_do_not_deadlock(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(pages=10)
    a, b = list(range(3, 163)), list(range(170, 298))
    for handle, tokens in ((1, a), (2, b)):
        engine.generate(handle, request(str(handle), tokens, max_tokens=1))
        drain(engine)
    longer_a = request("a", a + b, max_tokens=2)
    longer_b = request("b", b + a, max_tokens=2)
    assert engine.receive(3, longer_a) == 160
    assert engine.receive(4, longer_b) == 128
    engine.reserve(3)
    engine.reserve(4)
    engine.plan()
    assert [s.handle for s in engine.scheduler.take_reserved()] == [3]
    engine.drop(3)
    engine.plan()
    # Its cached prefix had to make room meanwhile: it is told so, not left waiting.
    settled = engine.scheduler.take_reserved() + engine.scheduler.take_evicted()
    assert [s.handle for s in settled] == [4]


def test_oldest_sequence_is_never_overtaken(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(pages=8)
    engine.generate(1, request("1", list(range(3, 103)), max_tokens=20))  # 4 pages
    engine.plan()
    engine.generate(2, request("2", list(range(110, 310)), max_tokens=2))  # 7: has to wait
    engine.receive(3, request("3", [5] * 20))
    engine.reserve(3)  # 1 page is free, but it is not its turn
    engine.plan()
    assert engine.scheduler.take_reserved() == []
    while 1 in engine.scheduler.sequences:
        engine.run(engine.plan())
    engine.plan()
    assert engine.scheduler.sequences[2].pages


def test_parents_of_a_cached_block_are_cached(make_engine: Callable[..., Engine]) -> None:
    """Two requests compute the same prefix at once; both their ends can be found afterwards."""
    engine = make_engine(chunk=512)
    shared = list(range(3, 67))
    prompts = [shared + [100 + i] * 40 for i in range(2)]
    for i, tokens in enumerate(prompts):
        engine.generate(i, request(str(i), tokens, max_tokens=1))
    assert drain(engine).keys() == {0, 1}
    for tokens in prompts:
        assert engine.manager.count_cached(block_keys(ROOT, tokens), 3) == 3
    assert engine.manager.available == 64


@pytest.mark.parametrize("top_p", [1e-46, 1e-9, 0.5])
def test_tiny_top_p_leaves_the_most_likely_token(
    make_engine: Callable[..., Engine], top_p: float
) -> None:
    tokens = list(range(3, 40))
    engine = make_engine()
    engine.generate(1, request("greedy", tokens))
    engine.generate(2, request("narrow", tokens, temperature=1e-3, top_p=top_p, seed=3))
    out = drain(engine)
    assert out[1] == out[2]
