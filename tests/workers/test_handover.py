"""Prefill on one worker, decode on another: the text is that of one engine, whatever happens."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from cluster.local.redis_server import EmbeddedRedis
from cluster.worker.worker import Worker
from decode_worker.candidates import PrefillCandidates
from decode_worker.handover import Handover
from engine.ipc import messages as m
from engine.process.session import EngineSession
from kvtransfer.inbound import InboundTransfer
from protocol.errors import CarrierFailed, NoPages, PeerRefused, TransferFailed
from protocol.requests import Request
from protocol.wire import wire_pb2 as pb
from tests.engine.conftest import request
from tests.workers.conftest import Oracle
from tests.workers.harness import (
    Answer,
    Client,
    attached,
    free_again,
    running,
    settings,
    until,
)


def prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 320) for _ in range(length)]


async def resume(client: Client, asked: Request, answer: Answer) -> Answer:
    """What a router does: ask again with the tokens that came, as often as it is moved."""
    async with asyncio.timeout(60):
        await answer.ended.wait()
        emitted = list(answer.tokens)
        for attempt in itertools.count(2):
            again = msgspec.structs.replace(asked.resumed(emitted), id=f"{asked.id}.{attempt}")
            resumed = await client.ask(again)
            if not resumed.moved:
                return resumed
    raise AssertionError


def mixed(count: int, length: int = 150, first: int = 0, **options: object) -> list[Request]:
    """``first``: seed of the first; the others have the next ones."""
    return [
        request(
            f"r{i}",
            prompt(length + 13 * i, first + i),
            seed=i,
            **{"max_tokens": 24, "temperature": float(i % 2), **options},
        )
        for i in range(count)
    ]


Pair = tuple[Worker, Worker]


@pytest_asyncio.fixture(scope="module")
async def started(model: Path, shared_redis: EmbeddedRedis) -> AsyncIterator[Pair]:
    wanted = (settings(role, shared_redis, model) for role in ("prefill", "decode"))
    async with running(*wanted) as (p, d):
        yield p, d


@pytest_asyncio.fixture(scope="module")
async def started_slow(model: Path, shared_redis: EmbeddedRedis) -> AsyncIterator[Pair]:
    p = settings("prefill", shared_redis, model, prefill_chunk=8)
    async with running(p, settings("decode", shared_redis, model)) as (slow, d):
        yield slow, d


@pytest_asyncio.fixture
async def pair(started: Pair) -> Pair:
    """A prefill and a decode worker, for tests whose prompts nobody else has."""
    return await whole(started)


@pytest_asyncio.fixture
async def slow_pair(started_slow: Pair) -> Pair:
    """Of these, prompts are under way for long."""
    return await whole(started_slow)


async def whole(pair: Pair) -> Pair:
    """Once both have an engine: the last test may have killed one."""
    await until(lambda: all(worker.record().engine_pid for worker in pair), 30.0)
    return pair


async def test_text_of_two_workers_is_that_of_one(pair: Pair, oracle: Oracle) -> None:
    p, d = pair
    async with attached(d, p) as client:
        requests = mixed(16)
        answers = await asyncio.gather(*(client.ask(r) for r in requests))
        for r, answer in zip(requests, answers, strict=True):
            assert answer.tokens == oracle(r), answer.error
            assert answer.finish == pb.FINISH_LENGTH
            assert "kv_ready" in answer.timeline  # it really came from the other worker
        await free_again(p)
        await free_again(d)


async def test_only_missing_blocks_travel_and_prefixes_are_reported(
    pair: Pair, oracle: Oracle
) -> None:
    p, d = pair
    async with attached(d, p) as client:
        first = request("a", prompt(200, 20))
        second = request("b", [*prompt(200, 20), *prompt(40, 21)])
        whole = await client.ask(first)
        assert whole.cached == 0
        answer = await client.ask(second)
        assert answer.cached == 192
        assert answer.tokens == oracle(second)
        assert whole.measured is not None and answer.measured is not None
        assert answer.measured.prefill_instance == p.instance
        assert (whole.measured.kv_tokens, answer.measured.kv_tokens) == (200, 240 - 192)
        assert whole.measured.kv_bytes > answer.measured.kv_bytes >= answer.measured.tail_bytes
        assert whole.measured.tail_seconds > 0


async def test_a_router_says_how_short_a_prompt_stays_here(pair: Pair, oracle: Oracle) -> None:
    p, d = pair
    async with attached(d, p) as client:
        for tokens, limit, local in ((100, 100, True), (101, 100, False), (8, 0, False)):
            client.local_prefill_tokens = limit
            asked = request(f"{tokens}", prompt(tokens, 500 + tokens))
            answer = await client.ask(asked)
            assert answer.tokens == oracle(asked)
            assert (answer.measured is None) == local


async def test_short_prompts_and_lone_workers_prefill_locally(pair: Pair, oracle: Oracle) -> None:
    p, d = pair
    async with attached(d, p) as client:
        short = request("a", prompt(8, 30))
        answer = await client.ask(short)
        assert answer.tokens == oracle(short) and "kv_ready" not in answer.timeline
        client.candidates = []
        long = request("b", prompt(200, 31))
        answer = await client.ask(long)
        assert answer.tokens == oracle(long) and "kv_ready" not in answer.timeline


async def test_first_token_may_be_the_last(pair: Pair, oracle: Oracle) -> None:
    p, d = pair
    async with attached(d, p) as client:
        r = request("a", prompt(100, 40), max_tokens=1)
        answer = await client.ask(r)
        assert answer.tokens == oracle(r) and answer.finish == pb.FINISH_LENGTH
        await free_again(p)
        await free_again(d)


async def test_prefill_engine_killed_under_load(slow_pair: Pair, oracle: Oracle) -> None:
    p, d = slow_pair
    async with attached(d, p) as client:
        requests = mixed(8, length=300, first=200)
        answers = [await client.submit(r) for r in requests]
        await asyncio.sleep(0.1)
        os.kill(p.record().engine_pid, signal.SIGKILL)
        for r, answer in zip(requests, answers, strict=True):
            async with asyncio.timeout(30):
                await answer.ended.wait()
            assert answer.tokens == oracle(r), answer.error
        await free_again(d)
        async with asyncio.timeout(30):
            for seed in itertools.count(100):  # until the prefill worker's new engine serves
                fresh = request(f"again{seed}", prompt(200, seed))
                if "kv_ready" in (await client.ask(fresh)).timeline:
                    break
                await asyncio.sleep(0.2)


async def test_decode_engine_killed_mid_stream(pair: Pair, oracle: Oracle) -> None:
    p, d = pair
    async with attached(d, p) as client:
        requests = mixed(8, first=700, max_tokens=200)
        answers = [await client.submit(r) for r in requests]
        await asyncio.gather(*(a.first.wait() for a in answers))
        os.kill(d.record().engine_pid, signal.SIGKILL)
        resumed = await asyncio.gather(
            *(resume(client, r, a) for r, a in zip(requests, answers, strict=True))
        )
        for r, first, second in zip(requests, answers, resumed, strict=True):
            assert first.retryable and not first.moved  # a death, and no move
            assert first.tokens + second.tokens == oracle(r), second.error


async def test_stuck_engine_is_replaced_within_five_seconds(pair: Pair, oracle: Oracle) -> None:
    _, d = pair
    async with attached(d) as client:
        pid = d.record().engine_pid
        os.kill(pid, signal.SIGSTOP)
        answer = await client.submit(request("a", prompt(100, 50)))
        async with asyncio.timeout(5):
            await answer.ended.wait()
        assert answer.retryable and (d._engine.current is None or d.record().engine_pid != pid)
        resumed = await resume(client, request("a", prompt(100, 50)), answer)
        assert answer.tokens + resumed.tokens == oracle(request("a", prompt(100, 50)))


async def test_what_is_not_done_when_the_drain_ends_is_handed_over(
    redis: EmbeddedRedis, model: Path, oracle: Oracle
) -> None:
    async with (
        running(settings("decode", redis, model), settings("decode", redis, model)) as (
            going,
            staying,
        ),
        attached(going) as client,
        attached(staying) as other,
    ):
        requests = mixed(4, max_tokens=400)  # far more than a drain has time for
        answers = [await client.submit(r) for r in requests]
        await asyncio.gather(*(a.first.wait() for a in answers))
        stopping = asyncio.create_task(going.stop(drain_s=0.05))
        await until(lambda: client.draining)
        late = await client.ask(request("late", prompt(30, 9)))
        assert late.moved and late.retryable and not late.tokens
        await stopping
        assert all(first.ended.is_set() and first.moved for first in answers)
        resumed = await asyncio.gather(
            *(resume(other, r, a) for r, a in zip(requests, answers, strict=True))
        )
        for r, first, second in zip(requests, answers, resumed, strict=True):
            assert first.tokens + second.tokens == oracle(r), second.error


@pytest.mark.parametrize("error", [CarrierFailed("tcp: no KV frame"), NoPages("no pages")])
async def test_failed_transfer_is_tried_again_with_the_same_worker(
    pair: Pair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, error: TransferFailed
) -> None:
    p, d = pair
    run, failed = InboundTransfer.run, 0

    async def fail_once(transfer: InboundTransfer, frame_s: float) -> None:
        nonlocal failed
        if not failed:
            failed += 1
            raise error
        await run(transfer, frame_s)

    monkeypatch.setattr(InboundTransfer, "run", fail_once)
    async with attached(d, p) as client:
        asked = request("a", prompt(400, 800 + len(str(error))))
        answer = await client.ask(asked)
        assert failed and answer.tokens == oracle(asked)
        assert answer.measured is not None and answer.measured.prefill_instance == p.instance
        assert answer.deaths == 0
        await free_again(p)
        await free_again(d)


@pytest.mark.parametrize("reason", ["draining", "another worker"])
async def test_worker_that_refuses_is_asked_once(
    pair: Pair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    p, d = pair
    errors: list[TransferFailed] = []
    failed = PrefillCandidates.failed

    def note(candidates: PrefillCandidates, candidate: object, error: TransferFailed) -> None:
        errors.append(error)
        failed(candidates, candidate, error)  # type: ignore[arg-type]

    monkeypatch.setattr(PrefillCandidates, "failed", note)
    async with attached(d, p) as client:
        if reason == "draining":
            monkeypatch.setattr(p._prefill, "draining", True)
        else:
            client.candidates[0].instance = "gone"
        asked = request("a", prompt(300, 870 + len(reason)))
        answer = await client.ask(asked)
        assert answer.tokens == oracle(asked) and answer.measured is None
        (error,) = errors
        assert isinstance(error, PeerRefused) and reason in str(error)


@pytest.mark.alone
async def test_pages_are_promised_while_the_prompt_is_computed_and_then_reserved(
    slow_pair: Pair, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = slow_pair
    for carrier in ("local", "tcp", "grpc"):
        d._receiver.links.measured(p.instance, carrier, 1e9)
    started: list[float] = []
    # When, and how many tokens were promised and asked for until then.
    reserved: list[tuple[float, int, int]] = []
    asked_before: list[int] = []
    on_started, send = Handover._on_started, EngineSession.send

    def awaited(load: pb.Load) -> int:
        return d.record().kv_tokens_free - load.kv_tokens_unused

    def note_started(handover: Handover, cached_tokens: int) -> None:
        started.append(time.monotonic())
        asked_before.append(awaited(d._decode._load()))
        on_started(handover, cached_tokens)

    def note_reserved(session: EngineSession, command: m.Command) -> None:
        if isinstance(command, m.Reserve):
            load = d._decode._load()
            free = d.record().kv_tokens_free - load.kv_tokens_free
            reserved.append((time.monotonic(), free, awaited(load)))
        send(session, command)

    monkeypatch.setattr(Handover, "_on_started", note_started)
    monkeypatch.setattr(EngineSession, "send", note_reserved)
    async with attached(d, p) as client:
        asked = request("a", prompt(900, 850))
        answer = await client.submit(asked)
        await answer.first.wait()
        first_s = time.monotonic() - started[0]
        ((at, promised, asked_for),) = reserved
        assert at - started[0] > first_s / 3, "pages lie idle while the prompt is computed"
        assert promised == asked_for == 900 and asked_before == [0]
        async with asyncio.timeout(30):
            await answer.ended.wait()
        assert answer.tokens == oracle(asked) and answer.measured is not None
        assert d._decode._promised_tokens == 0
        await free_again(d)


async def test_cancel_frees_pages_on_both_workers(slow_pair: Pair) -> None:
    p, d = slow_pair
    async with attached(d, p) as client:
        for r in mixed(6, length=400, first=300, max_tokens=400):
            await client.submit(r)
        await asyncio.sleep(0.3)
        for name in list(client.answers):
            await client.cancel(name)
        await free_again(p)
        await free_again(d)


async def test_router_gone_frees_pages_on_both_workers(slow_pair: Pair) -> None:
    p, d = slow_pair
    async with attached(d, p) as client:
        for r in mixed(6, length=400, first=400, max_tokens=400):
            await client.submit(r)
        await asyncio.sleep(0.3)
    await free_again(p)
    await free_again(d)


async def test_a_request_under_which_three_workers_died_ends(slow_pair: Pair) -> None:
    """Two have before; the third is the prefill worker that is asked now. Nothing is left of it."""
    p, d = slow_pair
    async with attached(d, p) as client:
        answer = await client.submit(request("a", prompt(900, 1), max_tokens=100), deaths=2)
        await until(lambda: p._prefill.calls > 0)
        os.kill(p.record().engine_pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            await answer.ended.wait()
        assert answer.finish == pb.FINISH_ERROR and "3 workers died" in answer.error
        assert not answer.retryable and answer.deaths == 1
        await free_again(d)
        session = d._engine.current
        assert session is not None and not session._listeners


async def test_a_request_that_cannot_fit_is_refused(pair: Pair) -> None:
    _, d = pair
    async with attached(d) as client:
        answer = await client.ask(request("a", prompt(100, 1), max_tokens=5000))
        assert answer.finish == pb.FINISH_ERROR and not answer.retryable
        assert "5100" in answer.error and "1024" in answer.error


async def test_more_requests_than_pages_all_finish(
    redis: EmbeddedRedis, model: Path, oracle: Oracle
) -> None:
    small = {"kv_tokens": 640}
    async with (
        running(
            settings("prefill", redis, model, **small), settings("decode", redis, model, **small)
        ) as (p, d),
        attached(d, p) as client,
    ):
        requests = mixed(10, length=100, max_tokens=60)
        answers = await asyncio.gather(*(client.ask(r, 60) for r in requests))
        for r, answer in zip(requests, answers, strict=True):
            assert answer.tokens == oracle(r), answer.error


async def test_what_the_decode_worker_holds_but_nobody_spared_is_not_called_cached(
    pair: Pair,
) -> None:
    """Its blocks need not travel; yet the prefill worker computed the whole prompt."""
    p, d = pair
    async with attached(d) as client:
        await client.ask(request("a", prompt(600, 60)))
    async with attached(d, p) as client:
        answer = await client.ask(request("b", [*prompt(600, 60), *prompt(100, 61)]))
        assert "kv_ready" in answer.timeline and answer.cached == 0
