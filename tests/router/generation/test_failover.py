"""Decode workers that die or refuse, while requests are in them."""

from __future__ import annotations

import asyncio
import re
import signal
import sys

import pytest
from tokenizers import Tokenizer

from protocol.wire import wire_pb2 as pb
from tests.router.conftest import Cluster, Start, until
from tests.router.fake_worker import FakeWorker, expected, outputs, silent
from tests.router.http.api.test_stream import frames, load_of, served, text_of


def first_used(cluster: Cluster) -> int:
    """Which of the two workers takes a request when both are idle."""
    one, two = cluster.workers
    return 0 if one.instance < two.instance else 1


@pytest.mark.parametrize("after", [0, 1, 7])
async def test_a_worker_dies_and_another_goes_on(
    start: Start, tokenizer: Tokenizer, after: int
) -> None:
    cluster = await start(outputs(delay=0.005), outputs(delay=0.005))
    dying = cluster.workers[first_used(cluster)]
    other = cluster.workers[1 - first_used(cluster)]
    dying.script = outputs(delay=0.005, die_after=after)
    prompt = tokenizer.encode("hello 🦊").ids
    async with served(cluster.app) as url:
        events = await frames(url, prompt=prompt, max_tokens=30, return_token_ids=True)
    assert events[-1] == "[DONE]"
    ids = expected(prompt, 30)
    assert [i for e in events[:-1] for i in e["choices"][0]["token_ids"]] == ids
    assert text_of(events) == tokenizer.decode(ids)
    [resumed] = other.requests
    assert list(resumed.request.emitted) == ids[:after]
    assert list(resumed.request.prompt) == prompt
    assert resumed.request.id != dying.requests[0].request.id
    assert resumed.request.sampling == dying.requests[0].request.sampling
    assert load_of(cluster) == 0


async def test_all_requests_of_a_dead_worker_move(start: Start) -> None:
    cluster = await start(outputs(delay=0.005), outputs(delay=0.005))
    dying = cluster.workers[first_used(cluster)]
    tasks = [asyncio.create_task(cluster.post(prompt=[5, 6], max_tokens=60)) for _ in range(8)]
    await until(lambda: len(dying.requests) >= 4)
    await dying.stop()
    for response in await asyncio.gather(*tasks):
        assert response.json()["usage"]["completion_tokens"] == 60


async def test_a_retryable_error_goes_to_the_other_worker(start: Start) -> None:
    cluster = await start(outputs(), outputs())
    refusing = cluster.workers[first_used(cluster)]
    refusing.script = outputs(error_after=2)
    response = await cluster.post(prompt=[5, 6, 7], max_tokens=9, return_token_ids=True)
    assert response.json()["choices"][0]["token_ids"] == expected([5, 6, 7], 9)
    assert [len(w.requests) for w in cluster.workers] == [1, 1]


async def test_an_error_that_is_not_retryable_is_final(start: Start) -> None:
    cluster = await start(outputs(error_after=0, retryable=False))
    response = await cluster.post(prompt="x")
    assert (response.status_code, response.json()["error"]["code"]) == (500, "worker_error")
    assert len(cluster.workers[0].requests) == 1


async def test_three_attempts_and_no_more(start: Start) -> None:
    cluster = await start(outputs(error_after=0))
    response = await cluster.post(prompt="x")
    assert response.status_code == 503
    assert "boom" in response.json()["error"]["message"]
    assert len(cluster.workers[0].requests) == 3


async def test_three_attempts_then_an_error_frame(start: Start) -> None:
    cluster = await start(outputs(delay=0.002, error_after=3))
    async with served(cluster.app) as url:
        events = await frames(url, prompt=[5], max_tokens=50, return_token_ids=True)
    assert sum(len(e["choices"][0]["token_ids"]) for e in events[:-1]) == 9
    assert "boom" in events[-1]["error"]["message"]


async def test_what_is_handed_back_unharmed_counts_as_no_death(start: Start) -> None:
    cluster = await start(outputs(error_after=2, moved=True))
    response = await cluster.post(prompt=[5, 6, 7], max_tokens=19, return_token_ids=True)
    assert response.json()["choices"][0]["token_ids"] == expected([5, 6, 7], 19)
    assert [s.deaths for s in cluster.workers[0].requests] == [0] * 10


async def test_deaths_of_prefill_workers_count(start: Start) -> None:
    cluster = await start(outputs(error_after=2, moved=True, deaths=1))
    response = await cluster.post(prompt=[5, 6, 7], max_tokens=19)
    assert response.status_code == 503
    assert [s.deaths for s in cluster.workers[0].requests] == [0, 1, 2]


async def test_a_worker_that_says_it_drains_gets_nothing_new(start: Start) -> None:
    cluster = await start(outputs(), outputs())
    going, staying = cluster.workers
    links = cluster.app.state.router.pool.links
    assert (await cluster.post(prompt=[5, 6], max_tokens=3)).status_code == 200
    assert [s.has_alternative for w in cluster.workers for s in w.requests] == [True]
    going.requests.clear()
    staying.requests.clear()
    going.say_draining()
    await until(lambda: not links[going.instance].ready)
    for _ in range(4):
        assert (await cluster.post(prompt=[5, 6], max_tokens=3)).status_code == 200
    assert (len(going.requests), len(staying.requests)) == (0, 4)


async def test_a_worker_without_an_engine_is_the_last_to_be_asked(start: Start) -> None:
    cluster = await start(outputs(), outputs())
    down, up = cluster.workers
    down.load = pb.Load(down=True)
    links = cluster.app.state.router.pool.links
    await until(lambda: links[down.instance].down)
    for _ in range(4):
        assert (await cluster.post(prompt=[5, 6], max_tokens=3)).status_code == 200
    assert (len(down.requests), len(up.requests)) == (0, 4)
    assert not any(submit.has_alternative for submit in up.requests)
    await up.stop()
    cluster.workers.remove(up)
    await cluster.attached(1)
    assert (await cluster.post(prompt=[5, 6], max_tokens=3)).status_code == 200
    assert len(down.requests) == 1


async def test_a_silent_worker_is_left_and_rejoins(start: Start) -> None:
    cluster = await start(outputs(delay=0.01))
    worker = cluster.workers[0]
    task = asyncio.create_task(cluster.post(prompt=[5], max_tokens=100, return_token_ids=True))
    await until(lambda: bool(worker.requests))
    worker.mute.set()
    began = asyncio.get_running_loop().time()
    await cluster.attached(0)
    assert asyncio.get_running_loop().time() - began < 5
    await until(lambda: worker.streams == 1)  # the stale one is closed, another opened
    worker.mute.clear()
    assert (await task).json()["choices"][0]["token_ids"] == expected([5], 100)
    assert len(worker.requests) == 2


async def test_an_interrupted_request_waits_for_a_worker_to_come(start: Start) -> None:
    cluster = await start(outputs(delay=0.01, die_after=5))
    lost = cluster.workers[0]
    task = asyncio.create_task(cluster.post(prompt=[5, 6], max_tokens=20, return_token_ids=True))
    await until(lambda: bool(lost.requests))
    await lost.stop()
    await cluster.attached(0)
    cluster.workers.remove(lost)
    await cluster.add(outputs())
    assert (await task).json()["choices"][0]["token_ids"] == expected([5, 6], 20)


async def test_it_does_not_wait_for_ever(start: Start) -> None:
    cluster = await start(silent, resubmit_wait_s=0.2)
    task = asyncio.create_task(cluster.post(prompt="x"))
    await until(lambda: bool(cluster.workers[0].requests))
    await cluster.workers[0].stop()
    assert (await task).status_code == 503


async def test_it_does_not_go_on_with_another_model(start: Start) -> None:
    cluster = await start(silent)
    lost = cluster.workers[0]
    task = asyncio.create_task(cluster.post(prompt="x"))
    await until(lambda: bool(lost.requests))
    await lost.stop()
    cluster.workers.remove(lost)
    changed = await cluster.add(outputs(), fingerprint="e" * 32)
    response = await task
    assert response.status_code == 503
    assert "model has changed" in response.json()["error"]["message"]
    assert not changed.requests


async def test_a_worker_that_stands_still_is_left(start: Start) -> None:
    """Its process is stopped: the connection stays up, and only its silence can tell."""
    cluster = await start()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.router.fake_worker"), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        stuck = FakeWorker(outputs(), cluster.model)
        stuck.port = int(await process.stdout.readline())
        cluster.workers.append(stuck)
        await cluster.attached(1)
        request = cluster.post(prompt=[5, 6], max_tokens=100, return_token_ids=True)
        task = asyncio.create_task(request)
        page = cluster.app.state.router.metrics.page
        await until(lambda: re.search(rb"\nbaton_requests_running{.*} 1.0\n", page()) is not None)
        process.send_signal(signal.SIGSTOP)
        cluster.workers.remove(stuck)
        await cluster.add(outputs())
        response = await asyncio.wait_for(task, 5)
        assert response.json()["choices"][0]["token_ids"] == expected([5, 6], 100)
        [resumed] = cluster.workers[0].requests
        assert 0 < len(resumed.request.emitted) < 100
    finally:
        process.kill()
        await process.wait()
