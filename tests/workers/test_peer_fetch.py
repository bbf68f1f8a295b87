"""The next turn of a chat goes elsewhere, and the KV of the last one comes along."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import pytest_asyncio

from cluster.redis_server import EmbeddedRedis
from cluster.worker import Worker
from engine.kv_format import Codec
from kvtransfer.frames import FrameHeader, pack
from kvtransfer.prefillers import Prefillers
from protocol import wire_pb2 as pb
from protocol.request import Request, to_wire
from tests.engine.conftest import request
from tests.workers.conftest import Oracle
from tests.workers.harness import (
    TOKEN,
    Answer,
    attached,
    candidate,
    free_again,
    running,
    settings,
)
from tests.workers.test_handover import prompt

FIRST = request("turn1", prompt(150, 1), max_tokens=75)  # 224 tokens have KV: 7 full blocks
BLOCKS = 7
BLOCK_BYTES = 3 * 32 * 2 * 2 * 16 * 4  # 3 layers, K and V of 2 heads of 16 elements


def source(worker: Worker, blocks: int = BLOCKS) -> pb.Fetch:
    record = worker.record()
    return pb.Fetch(
        instance=record.instance,
        endpoint=record.endpoint,
        kv_endpoint=record.kv_endpoint,
        blocks=blocks,
    )


def via(worker: Worker, fetch: pb.Fetch) -> pb.PrefillCandidate:
    """A prefill worker that is to fetch first."""
    chosen = candidate(worker)
    chosen.fetch.CopyFrom(fetch)
    return chosen


def next_turn(answer: list[int], more: int = 40) -> Request:
    return request("turn2", [*FIRST.prompt, *answer, *prompt(more, 2)], max_tokens=20)


Export = Callable[..., Awaitable[list[str]]]


@pytest_asyncio.fixture
async def export(redis: EmbeddedRedis, model: Path) -> AsyncIterator[Export]:
    """Asks a worker for what it has cached: nothing. Gives what came, or why it was refused."""
    async with running(settings("decode", redis, model)) as (worker,):
        session = worker._engine.current
        assert session is not None and session.ready is not None
        right = pb.PrefillStart(
            request=to_wire(request("r", prompt(64, 1))),
            instance=worker.instance,
            transfer="00" * 16,
            frame_bytes=1 << 20,
            model=session.ready.kv_identity,
            cached_only=True,
        )

        async def ask(**changes: Any) -> list[str]:
            start = pb.PrefillStart()
            start.CopyFrom(right)
            for field, value in changes.items():
                setattr(start, field, value)
            events = []
            call = prefillers.run(worker.record().endpoint)
            try:
                await call.write(pb.PrefillCall(start=start))
                while "sent" not in events:
                    events.append((await call.read()).WhichOneof("body"))
            except grpc.aio.AioRpcError as error:
                events.append(error.details() or "")
            call.cancel()
            return events

        prefillers = Prefillers(TOKEN)
        yield ask
        await prefillers.close()


async def first_turn(decode: Worker, *prefill: Worker) -> list[int]:
    async with attached(decode, *prefill) as client:
        answer = await client.ask(FIRST)
    assert answer.finish == pb.FINISH_LENGTH
    return answer.tokens


async def test_prefill_fetches_the_answer_from_where_it_was_given(
    redis: EmbeddedRedis, model: Path, oracle: Oracle
) -> None:
    roles = ("prefill", "decode", "decode")
    async with running(*(settings(role, redis, model) for role in roles)) as (p, d1, d2):
        turn = next_turn(await first_turn(d1, p))
        async with attached(d2) as client:
            client.candidates = [via(p, source(d1))]
            answer = await client.ask(turn)
        assert answer.tokens == oracle(turn)
        assert answer.cached == BLOCKS * 32
        marks = answer.timeline
        order = [marks[e] for e in ("fetch_started", "fetch_done", "prefill_started", "kv_ready")]
        assert order == sorted(order)
        for worker in (p, d1, d2):
            await free_again(worker)


async def test_decode_fetches_itself_and_only_what_is_missing(
    redis: EmbeddedRedis, model: Path, oracle: Oracle
) -> None:
    async with running(settings("decode", redis, model), settings("decode", redis, model)) as (
        d1,
        d2,
    ):
        turn = next_turn(await first_turn(d1))
        async with attached(d2) as client:
            await client.ask(request("before", FIRST.prompt[:100], max_tokens=1))
            client.fetch = source(d1, blocks=100)  # more than there are in the prompt
            answer = await client.ask(turn)
            assert answer.tokens == oracle(turn)
            assert answer.cached == BLOCKS * 32 and "fetch_done" in answer.timeline
            came = d2._receiver.traffic.by_codec[Codec.RAW].bytes
            assert came // BLOCK_BYTES == BLOCKS - 3  # the rest was there
            again = await client.ask(request("again", [*turn.prompt, 5], max_tokens=1))
            assert again.cached == 8 * 32 and "fetch_started" not in again.timeline
        await free_again(d1)
        await free_again(d2)


async def fetched(worker: Worker, r: Request, fetch: pb.Fetch) -> Answer:
    """Without a prefill worker."""
    async with attached(worker) as client:
        client.fetch = fetch
        return await client.ask(r)


async def test_a_source_that_is_not_what_it_was_costs_the_work_alone(
    redis: EmbeddedRedis, model: Path, oracle: Oracle
) -> None:
    """Another instance, nobody there, another precision, nothing cached: all is computed."""
    other = settings("decode", redis, model, kv_precision="fp8")
    mine = settings("decode", redis, model)
    async with running(mine, mine, other) as (d1, d2, rounding):
        instance, nobody = source(d1), source(d1)
        instance.instance = d2.instance
        nobody.endpoint = nobody.kv_endpoint = "127.0.0.1:1"
        for i, fetch in enumerate((instance, nobody, source(rounding), source(d1))):
            r = request(f"r{i}", prompt(250, 10 + i))
            await fetched(rounding, r, pb.Fetch())  # there it is cached
            answer = await fetched(d2, r, fetch)
            assert answer.tokens == oracle(r), answer.error
            assert answer.cached == 0 and answer.timeline["prefill_started"] < 1.5
            assert "fetch_started" in answer.timeline and "fetch_done" not in answer.timeline


async def test_what_the_source_has_evicted_is_computed(
    redis: EmbeddedRedis, model: Path, oracle: Oracle
) -> None:
    small = settings("decode", redis, model, kv_tokens=12 * 32)
    async with running(small, settings("decode", redis, model)) as (d1, d2):
        turn = next_turn(await first_turn(d1))
        async with attached(d1) as client:
            # 9 pages: 5 are free, and 4 of the answer's blocks have to go.
            await client.ask(request("other", prompt(280, 5), max_tokens=2))
        answer = await fetched(d2, turn, source(d1))
        assert answer.tokens == oracle(turn)
        assert answer.cached == 3 * 32 and "fetch_done" in answer.timeline


def with_small_slots(worker: Worker) -> Worker:
    """Its engine, not started yet, will have slots of one block: many frames."""
    client = worker._engine
    shape = msgspec.structs.replace(client._spec.arena, slot_bytes=BLOCK_BYTES)
    client._spec = msgspec.structs.replace(client._spec, arena=shape)
    return worker


async def test_source_killed_in_the_middle(
    redis: EmbeddedRedis, model: Path, oracle: Oracle
) -> None:
    both = [settings("decode", redis, model)] * 2
    async with running(*both, prepare=with_small_slots) as (d1, d2), attached(d2) as client:
        long = request("long", prompt(900, 3))
        async with attached(d1) as first:
            await first.ask(long)
        client.fetch = source(d1, blocks=28)
        answer = await client.submit(long)
        traffic = d2._receiver.traffic.by_codec
        async with asyncio.timeout(5):
            while Codec.RAW not in traffic or traffic[Codec.RAW].frames < 3:
                await asyncio.sleep(0)
        os.kill(d1.record().engine_pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            await answer.ended.wait()
        assert answer.tokens == oracle(long), answer.error
        assert 3 * 32 <= answer.cached < 28 * 32  # what came whole was of use
        await free_again(d2)


async def test_source_that_stands_still(redis: EmbeddedRedis, model: Path, oracle: Oracle) -> None:
    """Who waits for it goes on in time, and who gives up leaves nothing behind."""
    roles = ("prefill", "decode", "decode")
    async with running(*(settings(role, redis, model) for role in roles)) as (p, d1, d2):
        turn = next_turn(await first_turn(d1))
        os.kill(d1.record().engine_pid, signal.SIGSTOP)
        async with attached(d2) as client:
            client.candidates = [via(p, source(d1))]
            await client.submit(request("given up", turn.prompt))
            await asyncio.sleep(0.3)
            await client.cancel("given up")
            await free_again(p)
            await free_again(d2)
            client.candidates, client.fetch = [], source(d1)
            answer = await client.ask(turn)
        assert answer.tokens == oracle(turn)
        assert "fetch_done" not in answer.timeline
        assert 1.5 < answer.timeline["prefill_started"] < 3.0


async def test_kv_that_is_not_finite_is_of_no_use(
    redis: EmbeddedRedis, model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetched or handed over, also when the sequence has joined the batch already."""

    def garbage(header: FrameHeader, payload: memoryview) -> bytes:
        return pack(header, b"\xff" * len(payload))

    async with running(settings("prefill", redis, model), settings("decode", redis, model)) as (
        p,
        d,
    ):
        monkeypatch.setattr("kvtransfer.source.pack", garbage)
        r = request("handed over", prompt(150, 5))
        async with attached(d, p) as client:
            answer = await client.ask(r, 10)
        assert answer.tokens == oracle(r), answer.error
        r = request("fetched", prompt(150, 6))
        async with attached(p) as client:
            await client.ask(r)
        answer = await fetched(d, r, source(p))
        assert answer.tokens == oracle(r), answer.error
        assert answer.cached == 0
        await free_again(d)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("codec", 1, "does not go with the KV precision exact"),
        ("model", "another/exact", "another/exact was asked for"),
        ("skip_blocks", 9, "beyond the prompt"),
        ("instance", "another", "another instance"),
        ("frame_bytes", 8, "at least"),
    ],
)
async def test_who_asks_for_the_wrong_thing_gets_nothing(
    export: Export, field: str, value: Any, why: str
) -> None:
    assert await export() == ["accepted", "started", "sent"]
    assert why in (await export(**{field: value}))[-1]
