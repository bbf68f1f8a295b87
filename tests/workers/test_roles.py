"""Workers that lend themselves to the other pool while they serve."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
from redis.exceptions import ConnectionError as RedisConnectionError

from cluster.autoscale.loans import RoleChange, request_role_change
from cluster.local.redis_server import EmbeddedRedis
from cluster.worker.worker import Worker
from protocol.endpoints.grpc_endpoints import LOOPBACK_ONLY
from protocol.registry.directory import WorkerRecord
from protocol.wire import wire_pb2 as pb
from tests.engine.conftest import request
from tests.workers.conftest import Oracle
from tests.workers.harness import TOKEN, attached, running, settings, until
from tests.workers.test_handover import prompt
from tests.workers.test_peer_fetch import source
from tests.workers.test_routed import Front, cached, front

ROLES = ("prefill", "decode", "decode")
LOANS = 5  # and as many returns
CLIENTS = 10
TOKENS = 150  # of an answer: it meets several changes


class Trio(NamedTuple):
    """A prefill worker and two decode workers, by what they were started for."""

    redis: EmbeddedRedis
    p: Worker
    d1: Worker
    d2: Worker

    @property
    def workers(self) -> tuple[Worker, Worker, Worker]:
        return self.p, self.d1, self.d2


async def lend(worker: Worker, role: str, drain_s: float = 0.0) -> RoleChange:
    endpoint = worker.record().endpoint
    return await request_role_change(
        endpoint, worker.instance, role, drain_s=drain_s, token=TOKEN, security=LOOPBACK_ONLY
    )


@pytest_asyncio.fixture(scope="module")
async def started(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trio]:
    redis = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    redis.start()
    wanted = [settings(role, redis, model, model_id="demo") for role in ROLES]
    async with running(*wanted) as (p, d1, d2):
        yield Trio(redis, p, d1, d2)
    redis.stop()


@pytest_asyncio.fixture
async def trio(started: Trio) -> AsyncIterator[Trio]:
    yield started
    for worker in started.workers:
        await lend(worker, worker.settings.role)


async def sees(router: Front, prefill: set[Worker], decode: set[Worker]) -> None:
    pool = router.state.pool

    def is_so() -> bool:
        ready = {instance for instance, link in pool.links.items() if link.ready}
        by_role = {w.instance for w in prefill}, {w.instance for w in decode}
        return (set(pool.prefill), ready) == by_role

    await until(is_so)


def tokens(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]  # type: ignore[no-any-return]


async def test_streams_run_through_ten_changes(
    trio: Trio, caplog: pytest.LogCaptureFixture
) -> None:
    """In both directions, under two routers; the text is that of a quiet cluster, and no change is
    a death."""
    prompts = [prompt(40 + 13 * number, number) for number in range(12)]
    async with front(trio.redis, 3) as one, front(trio.redis, 3) as two:
        quiet = list(map(tokens, await asyncio.gather(*(one.ask(p, TOKENS) for p in prompts))))
        lending = asyncio.create_task(loans(trio))
        said: list[tuple[int, list[int]]] = []

        async def client(router: Front, first: int) -> None:
            for turn in itertools.count(first):
                if lending.done():
                    return
                answer = await router.ask(prompts[turn % 12], TOKENS)
                said.append((turn % 12, tokens(answer)))

        await asyncio.gather(*(client((one, two)[n % 2], n) for n in range(CLIENTS)))
        assert await lending > 0, "requests that were handed over"
    assert len(said) >= CLIENTS
    for number, text in said:
        assert text == quiet[number]
    assert sum(sum(w._roles.role_changes.values()) for w in trio.workers) == 2 * LOANS
    moved = [r.getMessage() for r in caplog.records if r.name == "router.generation.choice_stream"]
    assert moved and all("lent to" in why or "is draining" in why for why in moved), moved


async def loans(trio: Trio) -> int:
    """Requests that were handed over. One worker at least decodes at any time."""
    moves = ((trio.d1, "prefill"), (trio.p, "decode"), (trio.d2, "prefill"))
    handed_over = 0
    for turn in range(LOANS):
        worker, away = moves[turn % 3]
        for role in (away, worker.settings.role):
            handed_over += (await lend(worker, role, 0.05)).handed_over
            await asyncio.sleep(0.2)
    return handed_over


async def test_what_is_cached_is_found_after_a_change(trio: Trio) -> None:
    """By the index: in every worker that has it, wherever it works now."""
    shared = prompt(192, 100)
    async with front(trio.redis, 3) as router:
        await asyncio.gather(*(router.ask([*shared, *prompt(40, 101 + i)]) for i in range(6)))
        await router.knows(shared)
        before = holders(router, shared)
        for worker, role in ((trio.p, "decode"), (trio.d1, "prefill")):
            await lend(worker, role)
        await sees(router, {trio.d1}, {trio.p, trio.d2})
        assert before and before <= holders(router, shared)
        assert cached(await router.ask([*shared, *prompt(40, 110)])) >= 192


def holders(router: Front, shared: list[int]) -> set[str]:
    """Workers that have all of it, as far as the router knows."""
    keys = router.keys(shared)
    return {i for i, blocks in router.state.index.match(keys).items() if blocks == len(keys)}


async def test_a_lent_worker_is_fetched_from(trio: Trio, oracle: Oracle) -> None:
    shared = prompt(192, 120)
    async with attached(trio.d1, trio.p) as client:
        await client.ask(request("first", [*shared, *prompt(40, 121)]))
    await lend(trio.p, "decode")
    asked = request("fetches", [*shared, *prompt(40, 122)], max_tokens=20)
    async with attached(trio.d2) as client:
        client.fetch = source(trio.p, 6)
        answer = await client.ask(asked)
    assert (answer.tokens, answer.cached) == (oracle(asked), 192)


async def test_an_engine_that_is_killed_while_lent_is_replaced_in_that_role(
    trio: Trio, oracle: Oracle
) -> None:
    await lend(trio.p, "decode")
    engine = trio.p.record().engine_pid
    os.kill(engine, signal.SIGKILL)
    await until(lambda: trio.p.record().engine_pid not in (0, engine), 60.0)
    record = trio.p.record()
    assert (record.role, record.home, record.lent) == ("decode", "prefill", True)
    asked = request("after", prompt(100, 110), max_tokens=30)
    async with attached(trio.p, trio.d1) as client:
        answer = await client.ask(asked)
    assert answer.tokens == oracle(asked)
    await lend(trio.p, "prefill")
    async with attached(trio.p) as client:
        await until(lambda: client.draining)
        refused = await client.ask(request("late", prompt(30, 111)))
    assert refused.moved and refused.retryable


async def test_a_router_without_its_directory_loses_nothing(trio: Trio) -> None:
    """Streams tell it what matters; it learns the rest when the directory is back."""
    async with front(trio.redis, 3) as router:
        pool, listed = router.state.pool, router.state.pool._list

        async def silent() -> list[WorkerRecord]:
            raise RedisConnectionError("away")

        pool._list = silent
        expected = tokens(await router.ask(prompt(60, 150), 200))
        asking = [asyncio.create_task(router.ask(prompt(60, 150), 200)) for _ in range(4)]
        await until(lambda: trio.d1._decode.request_count + trio.d2._decode.request_count == 4)
        await lend(trio.d1, "prefill")
        await until(lambda: not pool.links[trio.d1.instance].ready)
        await lend(trio.p, "decode")
        assert all(tokens(answer) == expected for answer in await asyncio.gather(*asking))
        assert tokens(await router.ask(prompt(60, 150), 200)) == expected
        await lend(trio.d1, "decode")
        await until(lambda: pool.links[trio.d1.instance].ready)
        await lend(trio.d1, "prefill")
        pool._list = listed
        await sees(router, {trio.d1}, {trio.p, trio.d2})
        assert tokens(await router.ask(prompt(60, 150), 200)) == expected


async def test_what_the_record_and_the_page_say(trio: Trio) -> None:
    async with attached(trio.d1) as client:
        await client.submit(request("long", prompt(40, 130), max_tokens=900))
        await until(lambda: trio.d1._decode.request_count == 1)
        change = asyncio.create_task(lend(trio.d1, "prefill", 0.2))
        await until(lambda: trio.d1.record().changing)
        record = trio.d1.record()
        assert (record.role, record.draining, record.lent) == ("decode", True, False)
        assert (await change).handed_over == 1
        answer = client.answers["long"]
        await until(answer.ended.is_set)
        assert answer.moved and answer.finish == pb.FINISH_ERROR
    record = trio.d1.record()
    assert (record.role, record.home, record.changing) == ("prefill", "decode", False)
    assert record.lent and not record.draining
    page = trio.d1._metrics._page().decode()
    counted = 'baton_role_flips_total{from="decode",model="demo",role="decode",to="prefill"}'
    assert f"{counted} {float(trio.d1._roles.role_changes['decode', 'prefill'])}" in page
    assert 'baton_draining{model="demo",replica=' in page
    assert 'role="decode"' not in page.replace(counted, "").replace(
        'baton_role_flips_total{from="prefill",model="demo",role="decode",to="decode"}', ""
    )
