"""Routers over real workers: shared prefixes are computed once, whoever asks, and predictions come
beside what happened."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from bench.lib.settings import router_settings
from cluster.local.redis_server import EmbeddedRedis
from cluster.models.locate import demo_path
from protocol.block_keys import block_keys, cache_root
from router.http.app import create_app
from router.http.state import RouterState
from router.tenants.tenant import DEFAULT_TENANT
from tests.router.conftest import until
from tests.workers.harness import TOKEN, running, settings

WORKERS = 4
SECRET = b"s" * 32


class Front:
    """A router in this process."""

    def __init__(self, state: RouterState, client: httpx.AsyncClient) -> None:
        self.state = state
        self._client = client

    async def ask(self, prompt: list[int], count: int = 8, **headers: str) -> dict[str, Any]:
        body = {"model": "demo", "prompt": prompt, "max_tokens": count, "temperature": 0}
        reply = await self._client.post(
            "/v1/completions",
            json={**body, "return_token_ids": True, "ignore_eos": True},
            headers={"x-baton-explain": "1", **headers},
            timeout=60,
        )
        assert reply.status_code == 200, reply.text
        return reply.json()  # type: ignore[no-any-return]

    def keys(self, tokens: list[int]) -> list[bytes]:
        """Of the whole blocks of a prompt."""
        model = self.state.pool.model
        assert model is not None
        root = cache_root(SECRET, DEFAULT_TENANT.name, model.fingerprint, model.precision)
        return block_keys(root, tokens)

    async def knows(self, tokens: list[int]) -> None:
        """Wait until the index has all whole blocks of these: events take a moment."""
        keys = self.keys(tokens)
        await until(lambda: len(keys) in self.state.index.match(keys).values())


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@contextlib.asynccontextmanager
async def front(redis: EmbeddedRedis, workers: int = WORKERS) -> AsyncIterator[Front]:
    app = create_app(
        router_settings(
            cluster="test",
            redis_url=redis.url,
            token=TOKEN,
            secret=SECRET,
            model_path=str(demo_path()),
            model_id="demo",
            refresh_s=0.1,
        )
    )
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client,
    ):
        pool = app.state.router.pool
        await until(lambda: pool.attached + len(pool.prefill) == workers)
        yield Front(app.state.router, client)


def prompt(seed: int, tokens: int) -> list[int]:
    return [3 + (seed * 7919 + i * i * 31 + i) % 500 for i in range(tokens)]


@pytest_asyncio.fixture(scope="module")
async def redis_with_workers(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[EmbeddedRedis]:
    redis = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    redis.start()
    roles = ("prefill", "prefill", "decode", "decode")
    wanted = [settings(role, redis, demo_path(), model_id="demo") for role in roles]
    async with running(*wanted):
        yield redis
    redis.stop()


async def test_a_shared_prefix_is_computed_once(redis_with_workers: EmbeddedRedis) -> None:
    shared = prompt(1, 320)
    async with front(redis_with_workers) as one, front(redis_with_workers) as two:
        first = await one.ask([*shared, *prompt(2, 40)])
        assert cached(first) == 0
        for router in (one, two):
            await router.knows(shared)
        for seed, router in enumerate((one, two, one, two)):
            assert cached(await router.ask([*shared, *prompt(3 + seed, 40)])) >= 320
        many = [
            router.ask([*shared, *prompt(20 + i, 40)]) for i in range(4) for router in (one, two)
        ]
        assert min(cached(answer) for answer in await asyncio.gather(*many)) >= 320
        other = await two.ask([*shared, *prompt(2, 40)])
        assert other["choices"] == first["choices"]
    async with front(redis_with_workers) as restarted:
        await restarted.knows(shared)
        assert cached(await restarted.ask([*shared, *prompt(90, 40)])) >= 320


async def test_the_next_turn_finds_the_answer(redis_with_workers: EmbeddedRedis) -> None:
    async with front(redis_with_workers) as router:
        turn = prompt(5, 20)  # less than a block: nobody but who answers has any of it
        first = await router.ask(turn, 241)
        answer = first["choices"][0]["token_ids"]
        await router.knows([*turn, *answer][:256])
        second = await router.ask([*turn, *answer, *prompt(6, 40)])
        assert cached(second) == 256, "8 blocks: 236 tokens of the answer"


async def test_what_happened_stands_beside_what_was_predicted(
    redis_with_workers: EmbeddedRedis,
) -> None:
    async with front(redis_with_workers) as router:
        answers = [await router.ask(prompt(30 + seed, 400)) for seed in range(12)]
        told = [answer["baton"]["attempts"][0] for answer in answers]
        for attempt in told:
            chosen, seen = attempt["chosen"], attempt["observed"]
            assert {"prefill_queued", "first_token", "finished"} <= seen["timeline"].keys()
            assert (seen["hand_over"] is None) == (chosen["prefill"] is None)
            if seen["hand_over"]:
                assert seen["hand_over"]["prefill_instance"] == chosen["prefill"]
        ratios = [t["observed"]["ttft_s"] / t["chosen"]["predicted"]["ttft_s"] for t in told]
        assert 0.1 < sorted(ratios)[6] < 10, ratios
