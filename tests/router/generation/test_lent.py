"""Workers that lend themselves to the other pool, as a router sees it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import msgspec
import pytest

from protocol.wire import wire_pb2 as pb
from router.workers.departures import GRACE_S, PrefillRegistry
from router.workers.pool import WorkerPool
from router.workers.probes import WorkerProbes
from tests.router.conftest import Start, until
from tests.router.fake_worker import expected, outputs, silent
from tests.router.workers.test_workers import new_pool, prefill


async def test_requests_on_a_lent_worker_s_link_end_as_they_would(start: Start) -> None:
    """What was handed back may come after the record."""
    cluster = await start(outputs(delay=0.02))
    [worker] = cluster.workers
    pool: WorkerPool = cluster.app.state.router.pool
    task = asyncio.create_task(cluster.post(prompt=[7, 8], max_tokens=30, return_token_ids=True))
    await until(lambda: bool(worker.requests))
    worker.say_draining()
    worker.role = "prefill"
    await until(lambda: worker.instance in pool.prefill)
    assert not pool.links and pool.attached == 0 and worker.streams == 1
    answer = (await task).json()
    assert answer["choices"][0]["token_ids"] == expected([7, 8], 30)
    assert worker.streams == 1, "it brings the load of the prefill worker"
    assert (await cluster.post(prompt="hi")).status_code == 503


async def test_a_worker_is_known_throughout(start: Start) -> None:
    """What is cached there, what it has to do and how it was to predict stay with its instance."""
    cluster = await start(outputs(), outputs())
    state, worker = cluster.app.state.router, cluster.workers[0]
    state.estimates.record_first_token(worker.instance, 0.1, 0.2)
    corrected = state.estimates.correction(worker.instance)
    seen: list[set[str]] = []
    told = state.pool._listener.on_workers
    state.pool._listener.on_workers = lambda records: (
        seen.append({r.instance for r in records}),
        told(records),
    )
    for role in ("prefill", "decode") * 3:
        worker.role = role
        await until(
            lambda role=role: (worker.instance in state.pool.prefill) == (role == "prefill")
        )
        assert (worker.instance in state.pool.links) == (role == "decode")
        assert len(state.pool.records) == 2
    both = {w.instance for w in cluster.workers}
    assert seen and all(instances == both for instances in seen)
    assert state.estimates.correction(worker.instance) == corrected != 1.0
    assert set(state.ledger.queues) == both
    await cluster.attached(2)


async def test_back_before_its_link_has_ended(start: Start) -> None:
    cluster = await start(silent)
    [worker] = cluster.workers
    pool: WorkerPool = cluster.app.state.router.pool
    [link] = pool.links.values()
    tasks = [asyncio.create_task(cluster.post(prompt="hi", max_tokens=3))]
    await until(lambda: len(worker.requests) == 1)
    worker.role = "prefill"
    await until(lambda: not pool.links)
    worker.role, worker.script = "decode", outputs()
    await until(lambda: list(pool.links.values()) == [link])
    assert worker.streams == 1, "the same stream, and the request on it"
    assert (await cluster.post(prompt="hi", max_tokens=3)).status_code == 200
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_stream_that_said_it_drains_is_up_again_when_it_is_a_new_one(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the directory: there and back again between two looks."""
    cluster = await start(outputs(), refresh_s=60.0)
    [worker] = cluster.workers
    [link] = cluster.app.state.router.pool.links.values()
    worker.say_draining()
    await until(lambda: not link.ready)
    with caplog.at_level(logging.INFO):
        for stream in list(worker._open):
            stream.dead.set()
        await until(lambda: link.ready)
    ended = [r for r in caplog.records if "stream ended" in r.message]
    assert [r.levelname for r in ended] == ["INFO"]
    assert (await cluster.post(prompt="hi", max_tokens=3)).status_code == 200


async def test_who_has_drained_and_is_back_is_asked_without_a_pause(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long stream may meet many loans."""
    monkeypatch.setattr("router.generation.choice_stream._RETRY_PAUSE_S", 30.0)
    cluster = await start(silent)
    [worker] = cluster.workers

    async def drains(request: pb.Request) -> AsyncIterator[pb.Output]:
        """One token, and the rest after the next change."""
        at = len(request.emitted)
        if at == 4:
            worker.script = outputs()
        yield pb.Output(id=request.id, tokens=expected(request.prompt, at + 1)[at:])
        worker.say_draining()
        yield pb.Output(
            id=request.id, finish=pb.FINISH_ERROR, error="lent", retryable=True, moved=True
        )
        await asyncio.sleep(0.05)
        for stream in list(worker._open):
            stream.dead.set()

    worker.script = drains
    async with asyncio.timeout(10):
        answer = await cluster.post(prompt=[7, 8, 9], max_tokens=12, return_token_ids=True)
    assert answer.json()["choices"][0]["token_ids"] == expected([7, 8, 9], 12)
    assert len(worker.requests) == 6


async def test_a_prefill_worker_that_decodes_is_asked_for_no_prompt(start: Start) -> None:
    cluster = await start(outputs())
    pool = new_pool(cluster)
    one = prefill("p0", cluster.model)
    cluster.prefill = [one, prefill("p1", cluster.model)]
    await pool.refresh()
    cluster.prefill[0] = msgspec.structs.replace(one, role="decode", home="prefill")
    await pool.refresh()
    assert list(pool.prefill) == ["p1"] and "p0" in pool.links
    cluster.prefill[0] = one
    await pool.refresh()
    assert sorted(pool.prefill) == ["p0", "p1"] and "p0" not in pool.links
    assert sorted(pool._load_links) == ["p0", "p1"]
    await pool.close()


async def test_a_link_stays_when_the_last_client_has_hung_up(start: Start) -> None:
    cluster = await start(silent)
    [worker] = cluster.workers
    pool: WorkerPool = cluster.app.state.router.pool
    task = asyncio.create_task(cluster.post(prompt="hi"))
    await until(lambda: bool(worker.requests))
    worker.role = "prefill"
    await until(lambda: worker.instance in pool.prefill)
    await asyncio.sleep(0.1)  # some looks later
    assert worker.streams == 1
    task.cancel()
    await until(lambda: pool._load_links[worker.instance].idle)
    assert worker.streams == 1


async def test_lately(model_info: object) -> None:
    now = 0.0

    async def refuse(record: object) -> bool:
        return False

    probes = WorkerProbes(refuse, lambda: now)
    lately = PrefillRegistry(probes, lambda: now)
    p0, p1 = (prefill(f"p{i}", model_info) for i in range(2))  # type: ignore[arg-type]
    assert sorted(lately.update([p0, p1])) == ["p0", "p1"]
    now = GRACE_S - 0.1
    assert sorted(lately.update([p1])) == ["p0", "p1"]
    await asyncio.sleep(0)  # for the probe
    assert sorted(lately.update([p1])) == ["p0", "p1"]
    now = GRACE_S + 0.1
    assert sorted(lately.update([p1])) == ["p1"]
    assert lately.update([msgspec.structs.replace(p1, role="decode")]) == {}
    assert lately.update([]) == {}, "it is not waited for in the role that it left"
    await probes.close()
