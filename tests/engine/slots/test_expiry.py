"""The engine computes nothing for requests whose deadline has passed, and frees what they had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.execution.engine import Engine
from engine.ipc import messages as m
from engine.kv_cache.kv_format import Codec
from protocol.requests import Request
from tests.engine.conftest import request
from tests.engine.slots.served import serving, shape_of

MakeEngine = Callable[..., Engine]

LONG = list(range(3, 300))


def due(name: str, token_s: float) -> Request:
    made = request(name, LONG, max_tokens=600)
    return msgspec.structs.replace(made, first_token_s=token_s, token_timeout_s=token_s)


def test_expired_sequences_are_dropped_wherever_they_are(
    make_engine: MakeEngine, tiny_folder: Path
) -> None:
    """One decodes on the only row, and goes on; one waits for the row, and one to be sent."""
    engine = make_engine(max_batch=1)
    now = 0.0
    engine._clock = lambda: now
    with serving(engine, tiny_folder, shape_of(engine)) as served:
        served.send(m.Generate(1, due("decoding", 50.0)))
        served.until(lambda: len(served.tokens(1)) > 2, "tokens")
        size = served.arena.shape.slot_bytes
        served.send(
            m.Generate(2, due("waiting", 5.0)),
            m.Prefill(3, due("to be sent", 5.0), size, Codec.RAW),
        )
        served.until(lambda: len(engine.scheduler.queue) == 2, "the other requests")
        now = 6.0
        served.wait(m.Expired, 2)
        served.wait(m.Expired, 3)
        assert not served.server._offers and 1 in engine.scheduler.sequences
        drawn = len(served.tokens(1))
        now = 51.0
        served.until(lambda: len(served.tokens(1)) > drawn, "a token of one that makes progress")
        served.send(m.Drop(1))
        served.until(lambda: not engine.scheduler.sequences, "the end of the first request")
        drawn = len(served.tokens(1))
        assert engine.manager.available == 64
        served.slot(m.EndOffer(3))
        served.send(m.Drop(2), m.Drop(3))  # as the front does, which hears of it late
        served.send(m.Generate(4, request("next", [3, 4], max_tokens=2)))
        served.until(lambda: len(served.tokens(4)) == 2, "the next request")
        assert len(served.tokens(1)) == drawn < 600
        assert not served.tokens(2) and not served.tokens(3)
