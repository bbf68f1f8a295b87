"""The numerics contract: text does not depend on what else runs, or on how the prompt came in."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.core import Engine
from engine.kv_format import Codec
from engine.pieces import cut
from protocol.request import Request
from tests.engine.conftest import drain, request

import torch  # isort: skip


def prompts(count: int, seed: int = 0) -> list[Request]:
    draw = random.Random(seed)
    out = []
    for i in range(count):
        tokens = [draw.randrange(3, 320) for _ in range(draw.choice([1, 7, 31, 32, 33, 90, 140]))]
        sampled = i % 2 == 1
        out.append(
            request(
                f"r{i}",
                tokens,
                max_tokens=draw.randrange(1, 40),
                temperature=1.0 if sampled else 0.0,
                top_p=0.9 if i % 4 == 3 else 1.0,
                seed=i,
            )
        )
    return out


def alone(make_engine: Callable[..., Engine], requests: list[Request]) -> dict[int, list[int]]:
    out = {}
    for i, r in enumerate(requests):
        engine = make_engine()
        engine.generate(i, r)
        out |= drain(engine)
    return out


@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_together_is_as_alone(make_engine: Callable[..., Engine], chunk: int) -> None:
    requests = prompts(16)
    engine = make_engine(chunk=chunk, max_batch=16, pages=256)
    for i, r in enumerate(requests):
        engine.generate(i, r)
    assert drain(engine) == alone(make_engine, requests)
    assert engine.manager.available == 256


def test_preempted_is_as_alone(make_engine: Callable[..., Engine]) -> None:
    requests = prompts(12, seed=5)
    engine = make_engine(pages=12, max_batch=8)
    preempted = 0
    original = engine.scheduler._preempt

    def count(sequence: object) -> None:
        nonlocal preempted
        preempted += 1
        original(sequence)  # type: ignore[arg-type]

    engine.scheduler._preempt = count  # type: ignore[method-assign, assignment]
    for i, r in enumerate(requests):
        engine.generate(i, r)
    assert drain(engine) == alone(make_engine, requests)
    assert preempted > 0
    assert engine.manager.available == 12


def test_prefix_is_reused_and_changes_nothing(make_engine: Callable[..., Engine]) -> None:
    shared = list(range(3, 103))
    first, second = request("a", [*shared, 7]), request("b", [*shared, 9, 9])
    engine = make_engine()
    engine.generate(0, first)
    drain(engine)
    engine.generate(1, second)
    engine.plan()
    assert engine.scheduler.sequences[1].cached == 96
    assert drain(engine)[1] == alone(make_engine, [request("x", [3]), second])[1]


def test_resumed_goes_on_as_if_nothing_happened(make_engine: Callable[..., Engine]) -> None:
    for r in prompts(6, seed=9):
        whole = alone(make_engine, [r])[0]
        for at in range(1, len(whole), 5):
            engine = make_engine()
            engine.generate(0, r.resumed(whole[:at]))
            assert drain(engine)[0] == whole[at:]


def hand_over(p: Engine, d: Engine, r: Request, frame_bytes: int) -> list[int]:
    """Prefill on one engine, move the missing blocks, decode on the other."""
    cached = d.receive(0, r) // 32
    d.reserve(0)
    p.prefill(0, r)
    first = drain(p)[0]
    d.plan()
    assert [s.handle for s in d.scheduler.take_reserved()] == [0]
    page_layer = p.format.page_layer_bytes(Codec.RAW)
    for piece in cut(cached, p.computed_blocks(0), 3, page_layer, frame_bytes):
        frame = torch.zeros(frame_bytes, dtype=torch.uint8)
        size = p.read(0, piece, frame)
        assert size == piece.bytes(page_layer) <= frame_bytes
        d.write(0, piece, frame[:size])
    p.drop(0)
    if r.sampling.max_tokens == 1:
        d.drop(0)
        return first
    d.join(0, first[0])
    return first + drain(d)[0]


@pytest.mark.parametrize("frame_bytes", [8192, 16384, 1 << 20])
def test_handed_over_is_as_alone(make_engine: Callable[..., Engine], frame_bytes: int) -> None:
    p, d = make_engine(), make_engine()
    for r in prompts(12, seed=3):
        assert hand_over(p, d, r, frame_bytes) == alone(make_engine, [r])[0]
        # Again: now both hold the prefix, and only what is missing travels.
        assert hand_over(p, d, r, frame_bytes) == alone(make_engine, [r])[0]
    assert p.manager.available == d.manager.available == 64


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_schedule_gives_the_same_text(
    make_engine: Callable[..., Engine], data: st.DataObject
) -> None:
    """Arrivals, cancellations and engine sizes drawn at random."""
    requests = prompts(6, seed=data.draw(st.integers(0, 50)))
    expected = alone(make_engine, requests)
    pages = data.draw(st.integers(8, 40))
    engine = make_engine(
        pages=pages,
        chunk=data.draw(st.sampled_from([8, 16, 64, 200])),
        max_batch=data.draw(st.integers(1, 6)),
    )
    arrivals = data.draw(st.lists(st.integers(0, 30), min_size=6, max_size=6))
    cancelled = data.draw(st.sets(st.integers(0, 5), max_size=2))
    out: dict[int, list[int]] = {i: [] for i in range(6)}
    for step in range(2000):
        for i, at in enumerate(arrivals):
            if at == step:
                engine.generate(i, requests[i])
            if at + 5 == step and i in cancelled:
                engine.drop(i)
        planned = engine.plan()
        if not planned and step > 40:
            break
        for token in engine.run(planned) if planned else []:
            out[token.handle].append(token.token)
    for i in range(6):
        if i in cancelled:
            assert out[i] == expected[i][: len(out[i])]
        else:
            assert out[i] == expected[i]
    assert engine.manager.available == pages
