"""Sampling through two workers: whichever draws the token, it is the one of a single engine, and
brings the log-probabilities that were asked for."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgspec
import pytest

from bench.lib.engines import engine_config
from cluster.local.redis_server import EmbeddedRedis
from engine.execution.engine import Engine
from engine.scheduling.step_policy import plan_prefill_step
from protocol.requests import Request, logprobs_from_wire
from protocol.wire import wire_pb2 as pb
from tests.engine.conftest import load_model, request
from tests.engine.test_sampling_engine import KINDS, collect
from tests.workers.conftest import Oracle
from tests.workers.harness import attached, running, settings


def asking() -> list[Request]:
    """A request of every kind with a prompt that is long enough to be handed over; every other
    one wants log-probabilities."""
    draw = random.Random(4)
    out = []
    for i, kind in enumerate(KINDS):
        prompt = [draw.randrange(3, 320) for _ in range(150 + 9 * i)]
        base = {"temperature": 1.0, "max_tokens": 16, "seed": i, "logprobs": 2 if i % 2 else None}
        out.append(request(f"r{i}", prompt, **{**base, **kind}))
    return out


async def test_every_kind_of_sampling_by_two_workers(
    redis: EmbeddedRedis, model: Path, oracle: Oracle
) -> None:
    async with (
        running(settings("prefill", redis, model), settings("decode", redis, model)) as (p, d),
        attached(d, p) as client,
    ):
        requests = asking()
        answers = await asyncio.gather(*(client.ask(r) for r in requests))
        for r, answer in zip(requests, answers, strict=True):
            assert answer.tokens == oracle(r), answer.error
            assert "kv_ready" in answer.timeline  # the first token is from the other worker
            check_logprobs(model, r, answer.logprobs)
        for r, answer in zip(requests, answers, strict=True):
            rest = msgspec.structs.replace(r.resumed(answer.tokens[:5]), id=f"{r.id}.2")
            assert (await client.ask(rest)).tokens == answer.tokens[5:]
        refused = await client.ask(request("bad", [5, 6], logit_bias=((320, 1.0),)))
        assert refused.finish == pb.FINISH_ERROR and not refused.retryable
        assert "logit_bias has token id 320" in refused.error


def check_logprobs(model: Path, r: Request, came: list[pb.Logprobs]) -> None:
    """As many as there are tokens, and those of a single engine; or none."""
    if r.sampling.logprobs is None:
        assert came == []
        return
    engine = Engine(
        load_model(model), engine_config(pages=64, max_model_len=1024), plan_prefill_step
    )
    engine.generate(0, r)
    entries = collect(engine)[0]
    for entry, wire in zip(entries, came, strict=True):
        assert entry is not None
        seen = logprobs_from_wire(wire)
        assert (seen.rank, seen.top_tokens) == (entry.rank, entry.top_tokens)
        assert seen.logprob == pytest.approx(entry.logprob, abs=1e-4)
        assert seen.top_logprobs == pytest.approx(entry.top_logprobs, abs=1e-4)
