"""Grammars and log-probabilities of prompts through two workers; requests that none can take."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from bench.lib.engines import engine_config
from cluster.local.redis_server import EmbeddedRedis
from cluster.worker.worker import Worker
from engine.execution.engine import Engine
from engine.scheduling.step_policy import plan_prefill_step
from protocol.requests import Request
from protocol.wire import wire_pb2 as pb
from tests.engine.conftest import drain, load_model, request
from tests.engine.families import save
from tests.engine.grammars import Constrained, regex, save_tokenizer
from tests.engine.test_grammar import KINDS, PERSON, assert_fits, wish
from tests.engine.thinking import assert_thought, thinking_folder, thinking_request
from tests.workers.harness import Answer, attached, free_again, running, settings

EOS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(save(tmp_path_factory.mktemp("grammar")))


class Oracle:
    """The text of a single engine."""

    def __init__(self, folder: Path) -> None:
        self.constrained = Constrained(folder, 320, (EOS,))
        self._model = load_model(folder)

    def __call__(self, r: Request) -> list[int]:
        engine = Engine(self._model, engine_config(pages=64, max_model_len=1024), plan_prefill_step)
        self.constrained.generate(engine, 0, r)
        return drain(engine)[0]


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest_asyncio.fixture(scope="module")
async def pair(folder: Path, shared_redis: EmbeddedRedis) -> AsyncIterator[tuple[Worker, Worker]]:
    """A prefill and a decode worker, for tests with prompts of their own."""
    wanted = (settings(role, shared_redis, folder) for role in ("prefill", "decode"))
    async with running(*wanted) as (p, d):
        yield p, d


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 320) for _ in range(length)]


async def test_a_grammar_holds_across_two_workers_and_resumption(
    pair: tuple[Worker, Worker], oracle: Oracle
) -> None:
    asked = [
        wish(f"r{i}", PERSON, prompt(i, 120 + 9 * i), seed=i, **kind)
        for i, kind in enumerate(KINDS)
    ]
    p, d = pair
    async with attached(d, p) as client:
        answers = await asyncio.gather(*(client.ask(r) for r in asked))
        for r, answer in zip(asked, answers, strict=True):
            assert answer.finish == pb.FINISH_STOP, answer.error
            assert "kv_ready" in answer.timeline  # the first token is from the other worker
            assert answer.tokens == oracle(r)
            assert_fits(oracle.constrained, answer.tokens, PERSON)
        whole = answers[1].tokens
        for cut in range(1, len(whole), 7):
            rest = msgspec.structs.replace(asked[1].resumed(whole[:cut]), id=f"rest{cut}")
            assert (await client.ask(rest)).tokens == whole[cut:]
        await free_again(d)
        await free_again(p)


async def test_a_grammar_waits_for_the_reasoning_across_two_workers(
    redis: EmbeddedRedis, tmp_path: Path
) -> None:
    folder = thinking_folder(tmp_path)
    oracle = Oracle(folder)
    asked = [thinking_request(f"r{i}", prompt(i, 120), folder, seed=i) for i in range(4)]
    async with (
        running(*(settings(role, redis, folder) for role in ("prefill", "decode"))) as (p, d),
        attached(d, p) as client,
    ):
        answers = await asyncio.gather(*(client.ask(r) for r in asked))
        for r, answer in zip(asked, answers, strict=True):
            assert answer.finish == pb.FINISH_STOP, answer.error
            assert "kv_ready" in answer.timeline  # the first token is from the other worker
            assert answer.tokens == oracle(r)
            assert_thought(oracle.constrained, answer.tokens)
        whole = answers[0].tokens
        for cut in (1, 5, len(whole) - 3):  # as after a migration
            rest = msgspec.structs.replace(asked[0].resumed(whole[:cut]), id=f"rest{cut}")
            assert (await client.ask(rest)).tokens == whole[cut:]


async def test_a_grammar_holds_with_kv_in_fp8(
    redis: EmbeddedRedis, folder: Path, oracle: Oracle
) -> None:
    asked = [wish(f"r{i}", PERSON, prompt(i, 120), seed=i) for i in range(6)]
    workers = (settings(role, redis, folder, kv_precision="fp8") for role in ("prefill", "decode"))
    async with running(*workers) as (p, d), attached(d, p) as client:
        for answer in await asyncio.gather(*(client.ask(r) for r in asked)):
            assert answer.finish == pb.FINISH_STOP, answer.error
            assert "kv_ready" in answer.timeline
            assert_fits(oracle.constrained, answer.tokens, PERSON)


async def test_what_is_wrong_with_a_request_is_told_by_its_field(
    redis: EmbeddedRedis, folder: Path
) -> None:
    def told(answer: Answer) -> tuple[str, str]:
        assert answer.finish == pb.FINISH_ERROR and not answer.retryable
        assert answer.invalid is not None, answer.error
        return answer.invalid.param, answer.invalid.code

    async with (
        running(
            settings("prefill", redis, folder), settings("decode", redis, folder, kv_tokens=320)
        ) as (p, d),
        attached(d, p) as client,
    ):
        grammar = ("response_format", "invalid_grammar")
        long = prompt(0, 100)
        bad = await client.ask(request("a", long, grammar='{"grammars": [{"lark_grammar": "x"}]}'))
        assert told(bad) == grammar and "grammar cannot be used" in bad.error
        tampered = request("b", long, grammar=regex("abc")).resumed((9, 9))
        assert told(await client.ask(tampered)) == ("response_format", "")
        big = await client.ask(request("c", prompt(1, 400), max_tokens=20))
        assert told(big) == ("prompt", "context_length_exceeded")
        assert "420 tokens" in big.error and "320" in big.error
        over = await client.ask(request("d", prompt(1, 1020), max_tokens=20))
        assert told(over) == ("max_tokens", "context_length_exceeded")
        much = request("e", prompt(1, 400), prompt_logprobs=20)
        wide = msgspec.structs.replace(much, prompt=much.prompt * 32)
        assert told(await client.ask(wide)) == ("prompt_logprobs", "")
        fine = await client.ask(request("f", long, max_tokens=5, grammar=regex("[ab]{9}")))
        assert (fine.finish, len(fine.tokens)) == (pb.FINISH_LENGTH, 5)


async def test_a_folder_without_a_tokenizer_serves_what_has_no_grammar(
    redis: EmbeddedRedis, model: Path
) -> None:
    async with running(settings("decode", redis, model)) as (d,), attached(d) as client:
        refused = await client.ask(request("a", [5, 6], grammar=regex("abc")))
        assert "tokenizer.json cannot be read" in refused.error and refused.invalid is not None
        assert (await client.ask(request("b", [5, 6]))).finish == pb.FINISH_LENGTH


def assert_same(came: Answer, expected: Answer) -> None:
    for a, b in zip(came.prompt_logprobs, expected.prompt_logprobs, strict=True):
        assert (a.rank, a.top_tokens) == (b.rank, b.top_tokens)
        assert [a.logprob, *a.top_logprobs] == pytest.approx([b.logprob, *b.top_logprobs], abs=1e-4)


async def test_prompt_log_probabilities_by_whichever_worker(
    pair: tuple[Worker, Worker], oracle: Oracle
) -> None:
    """Computed by one worker or the other, with its prefix cached or not: the same ones, once."""
    r = request("first", prompt(50, 200), prompt_logprobs=3, max_tokens=6)
    p, d = pair
    async with attached(d, p) as client:
        by_other = await client.ask(r)
        assert "kv_ready" in by_other.timeline
        assert len(by_other.prompt_logprobs) == 199
        assert by_other.tokens == oracle(r)
        again = await client.ask(msgspec.structs.replace(r, id="again"))
        assert again.cached == 0
        assert_same(again, by_other)
        client.local_prefill_tokens = 4096
        own = await client.ask(msgspec.structs.replace(r, id="own"))
        assert "kv_ready" not in own.timeline
        assert_same(own, by_other)
        assert again.tokens == own.tokens == by_other.tokens
        rest = msgspec.structs.replace(r.resumed(own.tokens[:2]), id="rest")
        resumed = await client.ask(rest)
        assert (resumed.tokens, list(resumed.prompt_logprobs)) == (own.tokens[2:], [])
        assert resumed.cached > 0
