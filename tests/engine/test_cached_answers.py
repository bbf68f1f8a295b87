"""What an engine says of its cache once a request has ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.execution.engine import Engine
from engine.execution.warm_up import warm_up
from engine.kv_cache.kv_format import Codec, KVPiece
from protocol.block_keys import KEY_BYTES, block_keys
from tests.engine.conftest import ROOT, drain, request


def stored(engine: Engine) -> list[bytes]:
    """Keys that came since the last call; none may have gone."""
    changes = engine.manager.take_changes()
    assert all(kind for kind, _ in changes)
    packed = b"".join(keys for _, keys in changes)
    return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]


# 40 tokens of prompt. The KV of an answer's last token is never computed: with 24 tokens of answer
# the second block lacks it, with 25 it is full.
@pytest.mark.parametrize(("answer", "blocks"), [(23, 1), (24, 1), (25, 2), (56, 2), (57, 3)])
def test_last_full_block_of_an_answer_is_cached_without_its_last_token(
    make_engine: Callable[..., Engine], answer: int, blocks: int
) -> None:
    engine = make_engine()
    engine.manager.record_changes()
    prompt = list(range(3, 43))
    engine.generate(1, request("1", prompt, max_tokens=answer))
    text = prompt + drain(engine)[1]
    assert stored(engine) == block_keys(ROOT, text)[:blocks]


@pytest.mark.parametrize(("answer", "blocks"), [(24, 1), (25, 2)])
def test_answer_to_a_received_prompt_is_cached(
    make_engine: Callable[..., Engine], answer: int, blocks: int
) -> None:
    source, target = make_engine(), make_engine()
    target.manager.record_changes()
    wanted = request("1", list(range(3, 43)), max_tokens=answer)
    source.prefill(1, wanted)
    first = drain(source)[1]
    assert target.receive(1, wanted) == 0
    target.reserve(1)
    target.plan()
    piece = KVPiece(0, source.format.layers, 0, 2)
    data = torch.empty(piece.bytes(source.format.block_layer_bytes(Codec.RAW)), dtype=torch.uint8)
    source.read(1, piece, data)
    target.write(1, piece, data)
    target.join(1, first[0])
    text = [*wanted.prompt, *first, *drain(target)[1]]
    assert stored(target) == block_keys(ROOT, text)[:blocks]


@pytest.mark.parametrize("sizes", [{}, {"max_model_len": 4}, {"pages": 3}, {"max_batch": 1}])
def test_warm_up_blocks_are_neither_kept_nor_reported(
    make_engine: Callable[..., Engine], sizes: dict[str, int]
) -> None:
    engine = make_engine(**sizes)
    engine.manager.record_changes()
    warm_up(engine)
    assert not engine.manager._page and engine.manager.available == engine.config.pages
