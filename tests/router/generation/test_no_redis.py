"""A request never waits for Redis: not one command is sent on its way."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from redis.asyncio.connection import AbstractConnection

from cluster.local.redis_server import EmbeddedRedis
from cluster.worker.event_log import CacheEventLog
from protocol.block_keys import block_keys, cache_root
from protocol.registry.directory import Directory, ModelInfo
from protocol.registry.redis_client import connect
from router.http.app import create_app
from router.placement.choose import choose_placement
from router.settings import RouterSettings
from tests.router.conftest import MODEL, until
from tests.router.fake_worker import FakeWorker, outputs

EXCHANGES = {"usage exchange", "send prefixes", "read prefixes"}
BACKGROUND = {"directory", "cache index", "lease", "cache events"} | EXCHANGES
"""Tasks that may send commands; the last one is the worker's, whose log shares this process."""

PROMPT = [5 + i % 200 for i in range(320)]


class Served:
    def __init__(self, app: Any, client: httpx.AsyncClient, redis: EmbeddedRedis) -> None:
        self.state = app.state.router
        self.client = client
        self.redis = redis

    async def ask(self) -> float:
        """Seconds of one request."""
        began = time.perf_counter()
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3}
        response = await self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return time.perf_counter() - began


@pytest.fixture
async def cluster(
    tmp_path: Path,
    settings: RouterSettings,
    model_info: ModelInfo,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Served]:
    """A router on a Redis, a worker that is registered there and tells what it has cached."""
    monkeypatch.setattr("router.generation.placer.choose_placement", choose_placement)
    redis = EmbeddedRedis(tmp_path)
    redis.start()
    worker = FakeWorker(outputs(), model_info)
    await worker.start()
    client = connect(redis.url)
    await Directory(client, "test").workers.renew(worker.record)
    log = CacheEventLog(client, "test", worker.instance)
    log.start()
    root = cache_root(settings.secret, "default", model_info.fingerprint, model_info.precision)
    log.stored(block_keys(root, PROMPT))
    changed = msgspec.structs.replace(settings, redis_url=redis.url)
    app = create_app(changed)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
    ):
        await until(lambda: app.state.router.pool.attached == 1)
        await until(lambda: app.state.router.index.entries == len(PROMPT) // 32)
        yield Served(app, http, redis)
    with contextlib.suppress(Exception):
        await log.close()
    await client.aclose()
    await worker.stop()
    redis.stop()


async def test_not_one_command(cluster: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    senders: Counter[str] = Counter()
    send = AbstractConnection.send_packed_command

    async def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        task = asyncio.current_task()
        senders[task.get_name() if task else ""] += 1
        await send(self, *args, **kwargs)

    monkeypatch.setattr(AbstractConnection, "send_packed_command", counted)
    mine = asyncio.current_task()
    assert mine is not None
    for _ in range(30):
        await cluster.ask()
    await until(lambda: senders["directory"] > 0 and senders["cache index"] > 0)
    assert senders[mine.get_name()] == 0
    assert set(+senders) <= BACKGROUND


async def test_a_redis_that_stands_still_or_dies_holds_nobody_up(cluster: Served) -> None:
    admin = connect(cluster.redis.url)
    await admin.execute_command("CLIENT", "PAUSE", "3000")
    await admin.aclose()
    assert max([await cluster.ask() for _ in range(20)]) < 1.5
    cluster.redis.stop()
    assert max([await cluster.ask() for _ in range(20)]) < 1.5
    assert cluster.state.index.entries == len(PROMPT) // 32, "a hint that is still good"
