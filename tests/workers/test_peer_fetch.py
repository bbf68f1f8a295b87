"""The next turn of a chat goes elsewhere, and the KV of the last one comes along."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import pytest_asyncio

from cluster.local.redis_server import EmbeddedRedis
from cluster.worker.worker import Worker
from kvtransfer.carrier import OutboundFrame
from kvtransfer.carriers import grpc_carrier
from kvtransfer.carriers.local_carrier import LocalCarrier
from kvtransfer.carriers.tcp_carrier import TcpCarrier
from kvtransfer.frames import pack_header, payload_checksum, unpack_header
from kvtransfer.receiver_context import PrefillChannels
from protocol.requests import Request, request_to_wire
from protocol.wire import wire_pb2 as pb
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

BLOCKS = 7
"""Full blocks of a first turn: 150 tokens, and 74 of the answer's 75."""

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


def first(seed: int) -> Request:
    return request(f"turn 1 {seed}", prompt(150, seed), max_tokens=75)


OF_AN_OFFER = ("name", "codec", "frame_bytes")

Trio = tuple[Worker, Worker, Worker]
Export = Callable[..., Awaitable[list[str]]]


@pytest_asyncio.fixture(scope="module")
async def trio(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trio]:
    """A prefill worker and two decode workers, for tests with prompts of their own."""
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    server.start()
    roles = ("prefill", "decode", "decode")
    async with running(*(settings(role, server, model) for role in roles)) as (p, d1, d2):
        yield p, d1, d2
    server.stop()


@pytest_asyncio.fixture
async def export(trio: Trio) -> AsyncIterator[Export]:
    """Asks a worker for what it has cached: nothing. Gives what came, or why it was refused."""
    worker = trio[1]
    session = worker._engine.current
    assert session is not None and session.ready is not None
    right = pb.PrefillStart(
        request=request_to_wire(request("r", prompt(64, 60))),
        instance=worker.instance,
        transfer="00" * 16,
        carriers=[pb.CarrierOffer(name="grpc", frame_bytes=1 << 20)],
        model=session.ready.kv_identity,
        cached_only=True,
    )

    async def ask(**changes: Any) -> list[str]:
        start = pb.PrefillStart()
        start.CopyFrom(right)
        for field, value in changes.items():
            setattr(start.carriers[0] if field in OF_AN_OFFER else start, field, value)
        events = []
        call = prefillers.open_call(worker.record().endpoint)
        try:
            await call.write(pb.PrefillCall(start=start))
            while "started" not in events:
                events.append((await call.read()).WhichOneof("body"))
        except grpc.aio.AioRpcError as error:
            events.append(error.details() or "")
        call.cancel()
        return events

    prefillers = PrefillChannels(TOKEN)
    yield ask
    await prefillers.close()


async def second(seed: int, decode: Worker, *prefill: Worker) -> Request:
    """The next turn of a chat whose first one ``decode`` has answered."""
    async with attached(decode, *prefill) as client:
        answer = await client.ask(first(seed))
    assert answer.finish == pb.FINISH_LENGTH
    tokens = [*first(seed).prompt, *answer.tokens, *prompt(40, seed + 1000)]
    return request(f"turn 2 {seed}", tokens, max_tokens=20)


async def test_prefill_fetches_the_answer_from_where_it_was_given(
    trio: Trio, oracle: Oracle
) -> None:
    p, d1, d2 = trio
    turn = await second(1, d1, p)
    async with attached(d2) as client:
        client.candidates = [via(p, source(d1))]
        answer = await client.ask(turn)
    assert answer.tokens == oracle(turn)
    assert answer.cached == BLOCKS * 32
    marks = answer.timeline
    order = [marks[e] for e in ("fetch_started", "fetch_done", "prefill_started", "kv_ready")]
    assert order == sorted(order)
    for worker in trio:
        await free_again(worker)


async def test_decode_fetches_itself_and_only_what_is_missing(trio: Trio, oracle: Oracle) -> None:
    _, d1, d2 = trio
    turn = await second(2, d1)
    traffic = d2._receiver.traffic
    async with attached(d2) as client:
        await client.ask(request("before", list(turn.prompt[:100]), max_tokens=1))
        before = traffic.bytes
        client.fetch = source(d1, blocks=100)  # more than there are in the prompt
        answer = await client.ask(turn)
        assert answer.tokens == oracle(turn)
        assert answer.cached == BLOCKS * 32 and "fetch_done" in answer.timeline
        assert (traffic.bytes - before) // BLOCK_BYTES == BLOCKS - 3  # the rest was there
        again = await client.ask(request("again", [*turn.prompt[:250], 5], max_tokens=1))
        assert again.cached == BLOCKS * 32 and "fetch_started" not in again.timeline
    await free_again(d1)
    await free_again(d2)


async def fetched(worker: Worker, r: Request, fetch: pb.Fetch) -> Answer:
    """Without a prefill worker."""
    async with attached(worker) as client:
        client.fetch = fetch
        return await client.ask(r)


async def test_a_source_that_is_not_what_it_was_costs_the_work_alone(
    trio: Trio, redis: EmbeddedRedis, model: Path, oracle: Oracle
) -> None:
    """Another instance, nobody there, another precision, nothing cached: all is computed."""
    _, d1, d2 = trio
    async with running(settings("decode", redis, model, kv_precision="fp8")) as (rounding,):
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
    trio: Trio, redis: EmbeddedRedis, model: Path, oracle: Oracle
) -> None:
    async with running(settings("decode", redis, model, kv_tokens=12 * 32)) as (small,):
        turn = await second(4, small)
        async with attached(small) as client:
            # 9 pages: 5 are free, and 4 of the answer's blocks have to go.
            await client.ask(request("other", prompt(280, 5), max_tokens=2))
        answer = await fetched(trio[2], turn, source(small))
        assert answer.tokens == oracle(turn)
        assert answer.cached == 3 * 32 and "fetch_done" in answer.timeline


def with_small_slots(worker: Worker) -> Worker:
    """Its engine, not started yet, will have slots of one block: many frames."""
    client = worker._engine
    shape = msgspec.structs.replace(client._settings.arena, slot_bytes=BLOCK_BYTES, outbound=2)
    client._settings = msgspec.structs.replace(client._settings, arena=shape)
    return worker


async def test_source_killed_in_the_middle(
    redis: EmbeddedRedis, model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame_message = grpc_carrier.frame_message

    def slowly(frame: OutboundFrame) -> bytes:
        time.sleep(0.02)
        return frame_message(frame)

    monkeypatch.setattr(grpc_carrier, "frame_message", slowly)
    both = [settings("decode", redis, model, kv_carriers=("grpc",))] * 2
    async with running(*both, prepare=with_small_slots) as (d1, d2), attached(d2) as client:
        long = request("long", prompt(900, 3))
        async with attached(d1) as first:
            await first.ask(long)
        client.fetch = source(d1, blocks=28)
        answer = await client.submit(long)
        traffic = d2._receiver.traffic
        async with asyncio.timeout(5):
            while traffic.frames < 3:
                await asyncio.sleep(0)
        os.kill(d1.record().engine_pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            await answer.ended.wait()
        assert answer.tokens == oracle(long), answer.error
        assert 3 * 32 <= answer.cached < 28 * 32  # what came whole was of use
        await free_again(d2)


async def test_kv_that_is_not_finite_is_of_no_use(
    trio: Trio, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fetched or handed over, also when the sequence is told to join before the engine looks."""
    p, d, _ = trio
    loop, pid = asyncio.get_running_loop(), d.record().engine_pid
    stops = [False]

    def garbage(frame: OutboundFrame) -> bytes:
        if stops and stops.pop():
            os.kill(pid, signal.SIGSTOP)
            loop.call_soon_threadsafe(loop.call_later, 0.3, os.kill, pid, signal.SIGCONT)
        payload = b"\xff" * len(frame.payload)
        header = unpack_header(frame.header)
        header = msgspec.structs.replace(header, checksum=payload_checksum(payload))
        return pack_header(header) + payload

    monkeypatch.setattr("kvtransfer.carriers.grpc_carrier.frame_message", garbage)
    for carrier in (LocalCarrier, TcpCarrier):
        monkeypatch.setattr(carrier, "offer", lambda *_: None)
    for stop in (False, True):
        stops, r = [stop], request(f"handed over {stop}", prompt(150, 50 + stop))
        async with attached(d, p) as client:
            answer = await client.ask(r, 10)
        assert answer.tokens == oracle(r), answer.error
        assert "not finite" in caplog.text and not stops
        caplog.clear()
    stops, r = [False], request("fetched", prompt(150, 52))
    async with attached(p) as client:
        await client.ask(r)
    answer = await fetched(d, r, source(p))
    assert answer.tokens == oracle(r), answer.error
    assert answer.cached == 0 and not stops
    await free_again(d)


async def test_who_asks_for_the_wrong_thing_gets_nothing(export: Export) -> None:
    assert await export() == ["accepted", "started"]
    for change, why in {
        ("codec", 1): "is not possible with the KV precision exact",
        ("model", "another/exact"): "KV of another/exact was requested",
        ("instance", "another"): "another worker",
        ("frame_bytes", 8): "at least",
        ("frame_bytes", 1 << 30): "at most",
        ("name", "pigeon"): "no common carrier: offered were 'pigeon'",
    }.items():
        assert why in (await export(**dict([change])))[-1]


async def test_source_that_stands_still(
    trio: Trio, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for it goes on in time, and who gives up leaves nothing behind."""
    p, d1, d2 = trio
    turn = await second(5, d1)
    os.kill(d1.record().engine_pid, signal.SIGSTOP)  # its front will replace it
    async with attached(d2) as client:
        client.candidates = [via(p, source(d1))]
        await client.submit(request("given up", list(turn.prompt)))
        async with asyncio.timeout(1.5):
            while not 0 < p.record().kv_tokens_free < p.record().kv_tokens_total:
                await asyncio.sleep(0.02)
        await client.cancel("given up")
        await free_again(p)
        monkeypatch.setattr("kvtransfer.peer_fetch.START_S", 0.5)
        client.candidates, client.fetch = [], source(d1)
        answer = await client.ask(turn)
    assert answer.tokens == oracle(turn)
    assert "fetch_started" in answer.timeline and "fetch_done" not in answer.timeline
    assert 0.4 < answer.timeline["prefill_started"] < 2.0
