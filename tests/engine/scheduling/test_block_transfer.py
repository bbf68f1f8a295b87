"""Cached blocks from one engine to another: complete blocks are cached, and no sequence waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.execution.engine import Engine
from engine.kv_cache.kv_format import Codec, KVPiece, split_into_pieces
from protocol.errors import InvalidRequest, TransferFailed
from protocol.requests import Request
from tests.engine.conftest import drain, request

MakeEngine = Callable[..., Engine]
PROMPT = list(range(3, 263))  # 8 full blocks and 4 tokens


@pytest.fixture
def source(make_engine: MakeEngine) -> Engine:
    """Has the prompt and 60 tokens of its answer: 319 with KV, 9 full blocks."""
    engine = make_engine()
    engine.generate(1, request("1", PROMPT, max_tokens=60))
    drain(engine)
    return engine


def answer(engine: Engine, tokens: list[int] = PROMPT, handle: int = 90) -> list[int]:
    engine.generate(handle, request("oracle", tokens, max_tokens=60))
    return drain(engine)[handle]


def pieces(engine: Engine, first: int, end: int, by_layer: bool = False) -> list[KVPiece]:
    size = engine.format.block_layer_bytes(Codec.RAW)
    return split_into_pieces(first, end, engine.format.layers, size, size * (1 if by_layer else 6))


def move(source: Engine, handle: int, piece: KVPiece, target: Engine, to: int) -> None:
    size = piece.bytes(source.format.block_layer_bytes(Codec.RAW))
    data = torch.empty(size, dtype=torch.uint8)
    source.read(handle, piece, data)
    target.write(to, piece, data)


def wanted(source: Engine) -> Request:
    return request("fetch", PROMPT + answer(source), max_tokens=1)


@pytest.mark.parametrize("by_layer", [False, True])
def test_imported_prefix_is_found_and_gives_the_same_text(
    source: Engine, make_engine: MakeEngine, by_layer: bool
) -> None:
    target = make_engine()
    turn = [*PROMPT, *answer(source), 7, 8, 9]
    expected = answer(make_engine(), turn)
    assert source.export(2, wanted(source)) == 9
    assert source.scheduler.take_started()[-1].cached == 288
    assert target.import_(5, wanted(source)) == (0, 10)
    for piece in pieces(source, 0, 9, by_layer):
        move(source, 2, piece, target, 5)
    target.end_import(5)
    assert target.scheduler.take_ended_imports() == [(5, 288)]
    source.drop(2)
    assert source.manager.available == target.manager.available == 64
    target.generate(6, request("2", turn, max_tokens=60))
    target.plan()
    assert [s.cached for s in target.scheduler.take_started()] == [288]
    assert drain(target)[6] == expected


def test_import_needs_only_missing_blocks(source: Engine, make_engine: MakeEngine) -> None:
    target = make_engine()
    target.generate(1, request("1", PROMPT[:128], max_tokens=1))
    drain(target)
    assert target.import_(5, request("fetch", PROMPT)) == (4, 8)
    assert source.export(2, request("fetch", PROMPT)) == 8
    for piece in pieces(source, 4, 8):
        move(source, 2, piece, target, 5)
    target.end_import(5)
    assert target.scheduler.take_ended_imports() == [(5, 256)]


@pytest.mark.parametrize(("by_layer", "count", "blocks"), [(False, 2, 4), (True, 8, 2)])
def test_complete_blocks_of_an_unfinished_import_stay_cached(
    source: Engine, make_engine: MakeEngine, by_layer: bool, count: int, blocks: int
) -> None:
    target = make_engine()  # three layers: a piece holds two blocks, or a layer of one
    source.export(2, request("fetch", PROMPT))
    target.import_(5, request("fetch", PROMPT))
    for piece in pieces(source, 0, 8, by_layer)[:count]:
        move(source, 2, piece, target, 5)
    target.end_import(5)
    assert target.scheduler.take_ended_imports() == [(5, blocks * 32)]
    assert target.manager.available == 64 and len(target.manager._page) == blocks


def test_invalid_piece_ends_an_import_and_keeps_earlier_blocks(
    source: Engine, make_engine: MakeEngine
) -> None:
    target = make_engine()
    source.export(2, request("fetch", PROMPT))
    target.import_(5, request("fetch", PROMPT))
    good, bad = pieces(source, 0, 8)[:2]
    move(source, 2, good, target, 5)
    size = bad.bytes(source.format.block_layer_bytes(Codec.RAW))
    with pytest.raises(TransferFailed, match="finite"):
        target.write(5, bad, torch.full((size,), 255, dtype=torch.uint8))
    assert 5 not in target.scheduler.sequences
    assert target.scheduler.take_ended_imports() == [(5, 64)]
    assert target.manager.available == 64


def test_invalid_piece_drops_a_receiving_sequence(source: Engine, make_engine: MakeEngine) -> None:
    """Nobody joins the batch over pages that were not written."""
    target = make_engine()
    target.receive(5, request("r", PROMPT))
    target.reserve(5)
    target.plan()
    piece = pieces(source, 0, 8)[0]
    size = piece.bytes(source.format.block_layer_bytes(Codec.RAW))
    with pytest.raises(TransferFailed, match="finite"):
        target.write(5, piece, torch.full((size,), 255, dtype=torch.uint8))
    assert 5 not in target.scheduler.sequences and target.manager.available == 64


def test_import_takes_idle_pages_and_leaves_one_per_decoding_sequence(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(pages=9)
    engine.generate(1, request("1", list(range(3, 63)), max_tokens=60))
    engine.run(engine.plan())
    assert len(engine.scheduler.decoding) == 1 and engine.manager.available == 7
    assert engine.import_(5, request("fetch", PROMPT[::-1])) == (0, 6)
    assert engine.import_(6, request("fetch", PROMPT)) == (1, 1)
    drain(engine)


def test_import_frees_its_pages_before_any_preemption(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(pages=9)
    expected = answer(make_engine(), list(range(3, 63)))
    engine.generate(1, request("1", list(range(3, 63)), max_tokens=60))
    engine.run(engine.plan())
    assert engine.import_(5, request("fetch", PROMPT[::-1])) == (0, 6)
    out = []  # it grows by 2 pages, one more than was left
    while step := engine.plan():
        assert not step.chunks  # it computes nothing twice
        out += [token.token for token in engine.run(step)]
    assert out == expected[1:]
    assert engine.scheduler.take_ended_imports() == [(5, 0)]
    assert engine.scheduler.sequences == {}


def test_waiting_sequence_gets_the_pages_of_an_import(make_engine: MakeEngine) -> None:
    engine = make_engine(pages=9)
    assert engine.import_(5, request("fetch", PROMPT)) == (0, 8)
    engine.generate(1, request("1", list(range(3, 63)), max_tokens=2))
    assert len(drain(engine)[1]) == 2
    assert engine.scheduler.take_ended_imports() == [(5, 0)]
    assert engine.manager.available == 9


def test_exported_blocks_are_not_evicted(source: Engine, make_engine: MakeEngine) -> None:
    assert source.export(2, request("fetch", PROMPT)) == 8
    for handle, seed in enumerate(range(5), 10):
        source.generate(handle, request("x", [seed + 3] * 300, max_tokens=2))
        drain(source)
    target = make_engine()
    target.import_(5, request("fetch", PROMPT))
    for piece in pieces(source, 0, 8):
        move(source, 2, piece, target, 5)
    target.end_import(5)
    assert answer(target) == answer(make_engine())


def test_context_larger_than_the_pool_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(pages=4)
    for take in (engine.export, engine.import_):
        with pytest.raises(InvalidRequest, match="pool"):
            take(1, request("fetch", PROMPT))
