"""Workers killed, stopped, drained and restarted under streams: no stream is lost or altered.

Two prefill and two decode workers, a router and Redis, each a process; no Ray.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence

import aiohttp
import msgspec
import pytest

from bench.chaos.kills import KINDS, run_with_kills
from bench.lib.oracle import (
    BUSY_ROUTER,
    EXACT,
    Oracle,
    StreamRecord,
    body,
    requests,
    stream,
    streams,
    wrong,
)
from bench.lib.report import percentile
from bench.lib.standalone import Standalone
from protocol.registry.directory import WorkerRecord
from protocol.requests import Request

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.timeout(150)]

PREFILL_LOST, DECODE_LOST = "prefill: UNAVAILABLE", ", attempt 1: "  # as the pool's log has it
EJECTED_S = 5.0
ADDED_STALL_S = 5.0


@pytest.fixture(scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Standalone]:
    folder = tmp_path_factory.mktemp("chaos")
    pool = Standalone(folder, worker_options=(*EXACT, "--drain-s", "1"), router_options=BUSY_ROUTER)
    try:
        await pool.start()
        yield pool
        ports = [int(e.rpartition(":")[2]) for r in await pool.records() for e in endpoints(r)]
    finally:
        await pool.close()
    assert not pool.left()
    for port in ports:
        with socket.socket() as s, pytest.raises(ConnectionRefusedError):
            s.connect(("127.0.0.1", port))


def endpoints(record: WorkerRecord) -> tuple[str, str]:
    return record.endpoint, record.kv_endpoint


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    return requests(seed=1)


@pytest.fixture(scope="module")
def texts(asked: list[Request], pool: Standalone) -> list[list[int]]:
    return Oracle()(asked)


@pytest.fixture(scope="module")
async def calm(pool: Standalone, asked: list[Request]) -> list[StreamRecord]:
    """The streams while nobody is hurt."""
    return await streams(pool.url, asked, "calm")


async def test_undisturbed(calm: list[StreamRecord], texts: list[list[int]]) -> None:
    assert not wrong(calm, texts)


@pytest.mark.parametrize("kinds", [(KINDS[0], KINDS[3]), (KINDS[1], KINDS[2])])
async def test_kill_9_of_each_kind(
    pool: Standalone,
    asked: list[Request],
    texts: list[list[int]],
    calm: list[StreamRecord],
    kinds: Sequence[tuple[str, str]],
) -> None:
    before = pool.said(PREFILL_LOST), pool.said(DECODE_LOST)
    got = await run_with_kills(pool, asked, kinds, seed=3)
    assert not wrong(got, texts)
    assert before[0] < pool.said(PREFILL_LOST) and before[1] < pool.said(DECODE_LOST)  # it did hurt
    added = [g.longest_wait_s - c.longest_wait_s for g, c in zip(got, calm, strict=True)]
    assert percentile(added, 0.99) < ADDED_STALL_S
    await pool.whole()


@pytest.mark.parametrize(
    "stopped", [("decode front", "prefill front"), ("decode front", "decode engine")], ids=str
)
async def test_who_stands_still_is_left_and_rejoins(
    pool: Standalone, asked: list[Request], texts: list[list[int]], stopped: tuple[str, ...]
) -> None:
    few = asked[:16]
    first = {r.role: r for r in reversed(await pool.records())}
    running = asyncio.create_task(streams(pool.url, few, f"stop{stopped}"))
    await asyncio.sleep(0.4)
    pids = [pid_of(first, what) for what in stopped]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(EJECTED_S), aiohttp.ClientSession() as session:
            while await pool.attached(session) != 1:
                await asyncio.sleep(0.05)
        got = await running
        assert not wrong(got, texts[:16])
        assert 2 < max(s.longest_wait_s for s in got) < 10  # some were in it
        # Nor does a new request wait for them.
        began = time.monotonic()
        assert not wrong(await streams(pool.url, few[:4], f"new{stopped}"), texts[:4])
        assert time.monotonic() - began < 10
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    await pool.whole(10)
    back = {r.instance: r for r in await pool.records()}
    for role in {what.split()[0] for what in stopped}:
        assert first[role].instance in back  # it went on; nobody had to start it again
        assert back[first[role].instance].engine_pid == first[role].engine_pid
    async with asyncio.timeout(3):  # and nobody computes what has been done elsewhere
        while any(r.running or r.waiting for r in await pool.records()):
            await asyncio.sleep(0.1)


def pid_of(records: dict[str, WorkerRecord], what: str) -> int:
    role, part = what.split()
    return records[role].pid if part == "front" else records[role].engine_pid


async def test_stuck_engines_are_replaced(
    pool: Standalone, asked: list[Request], texts: list[list[int]]
) -> None:
    few = asked[:16]
    running = asyncio.create_task(streams(pool.url, few, "stuck"))
    await asyncio.sleep(0.4)
    victims = {r.role: r.engine_pid for r in await pool.records()}
    for pid in victims.values():
        os.kill(pid, signal.SIGSTOP)
    got = await running
    assert not wrong(got, texts[:16])
    assert 2 < max(s.longest_wait_s for s in got) < 10
    await pool.whole()
    assert not set(victims.values()) & {r.engine_pid for r in await pool.records()}


def lengthened(request: Request, tokens: int) -> Request:
    sampling = msgspec.structs.replace(request.sampling, max_tokens=tokens)
    return msgspec.structs.replace(request, sampling=sampling)


def slow_to_draw(request: Request) -> Request:
    """Return the request with a text at random, of which drafts predict nothing."""
    sampling = msgspec.structs.replace(request.sampling, temperature=2.0, seed=1)
    return msgspec.structs.replace(request, sampling=sampling)


async def test_rolling_restart_loses_no_stream(
    pool: Standalone, asked: list[Request], texts: list[list[int]]
) -> None:
    """Streams come and go all the while, some longer than a drain; each must get its text."""
    over = asyncio.Event()
    long = [lengthened(r, 700 + 100 * i) for i, r in enumerate(asked[:4])]  # not in step
    mixed = [*long, *asked[4:8]]
    expected = [*await asyncio.to_thread(Oracle(), long), *texts[4:8]]
    handed_over = pool.said("the worker is stopping")
    before = {r.instance for r in await pool.records()}

    async def client(i: int, session: aiohttp.ClientSession) -> list[str]:
        faults: list[str] = []
        turn = 0
        while not over.is_set():
            seen = await stream(session, pool.url, mixed[i], f"rolling{turn}")
            faults += wrong([seen], [expected[i]])
            turn += 1
        return faults

    async with aiohttp.ClientSession() as session:
        clients = [asyncio.create_task(client(i, session)) for i in range(8)]
        for i in (0, 1):  # one of each kind at a time
            await asyncio.sleep(0.5)
            for process in (pool.workers[i], pool.workers[2 + i]):
                process.send_signal(signal.SIGTERM)
            gone = (pool.workers[i], pool.workers[2 + i])
            while any(process.poll() is None for process in gone):
                await asyncio.sleep(0.05)
            assert [process.returncode for process in gone] == [0, 0]
            await asyncio.sleep(0.2)
            await pool.whole()
        over.set()
        assert [fault for faults in await asyncio.gather(*clients) for fault in faults] == []
    assert pool.said("the worker is stopping") > handed_over
    assert not before & {r.instance for r in await pool.records()}


async def test_a_router_that_comes_back_serves_at_once(
    pool: Standalone, asked: list[Request], texts: list[list[int]]
) -> None:
    pool.restart_router()
    async with aiohttp.ClientSession() as session, asyncio.timeout(30):
        while not await pool.attached(session):
            await asyncio.sleep(0.02)
        assert not wrong([await stream(session, pool.url, asked[0], "router")], texts[:1])


async def test_the_third_death_ends_a_request_and_nothing_else(
    pool: Standalone, asked: list[Request], texts: list[list[int]]
) -> None:
    """Whoever has one of two long requests loses its engine, again and again."""
    await pool.whole()
    long = slow_to_draw(lengthened(asked[0], 3500))
    async with aiohttp.ClientSession() as session:
        streamed = asyncio.create_task(stream(session, pool.url, long, "a"))
        whole = asyncio.create_task(
            session.post(f"{pool.url}/v1/completions", json=body(long, "b", stream=False))
        )
        async with asyncio.timeout(60):
            while not (streamed.done() and whole.done()):
                await kill_engines_at_work(pool)
                await asyncio.sleep(0.2)
        seen = await streamed
        assert not seen.done and seen.tokens and "died" in seen.error
        response = await whole
        assert response.status == 503 and "died" in (await response.json())["error"]["message"]
        await pool.whole()
        assert not wrong([await stream(session, pool.url, asked[0], "c")], texts[:1])


async def kill_engines_at_work(pool: Standalone) -> None:
    for record in await pool.records():
        if record.role == "decode" and record.running:
            os.kill(record.engine_pid, signal.SIGKILL)
