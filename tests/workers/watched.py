"""A small cluster without Ray, under load, behind a real HTTP port: `/ui` is looked at with it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from bench.lib import settings as default_settings
from cluster.local.redis_server import EmbeddedRedis
from cluster.models.locate import demo_path
from router.http.app import create_app
from router.settings import RouterSettings
from tests.router.conftest import served, until
from tests.workers.harness import TOKEN, running, settings

ROLES = ("prefill", "decode")
HEADS = [f"# {n}\n" + "from collections import deque\nimport os, sys, json\n" * 6 for n in range(4)]
"""What prompts begin with: several blocks that workers find again."""


def router_settings(redis: EmbeddedRedis, **changes: Any) -> RouterSettings:
    return default_settings.router_settings(
        **{
            "cluster": "test",
            "redis_url": redis.url,
            "token": TOKEN,
            "secret": b"s" * 32,
            "model_path": str(demo_path()),
            "model_id": "baton-demo",
            "refresh_s": 0.1,
            **changes,
        }
    )


@contextlib.asynccontextmanager
async def workers(
    folder: Path, roles: tuple[str, ...] = ROLES, **changes: Any
) -> AsyncIterator[EmbeddedRedis]:
    """Of the demo model. Gives the Redis that they are listed in."""
    redis = EmbeddedRedis(folder)
    redis.start()
    try:
        wanted = [
            settings(role, redis, demo_path(), model_id="baton-demo", **changes) for role in roles
        ]
        async with running(*wanted):
            yield redis
    finally:
        redis.stop()


@contextlib.asynccontextmanager
async def router(redis: EmbeddedRedis, count: int, **changes: Any) -> AsyncIterator[Served]:
    """A router that knows ``count`` workers."""
    app = create_app(router_settings(redis, **changes))
    async with app.router.lifespan_context(app):
        pool = app.state.router.pool
        await until(lambda: pool.attached + len(pool.prefill) == count)
        async with served(app) as url:
            yield Served(app, url)


class Served:
    def __init__(self, app: FastAPI, url: str) -> None:
        self.app, self.url = app, url

    @property
    def looks(self) -> int:
        """Of all who watch, so far."""
        return int(self.app.state.router.live_overview.scrapes)


@contextlib.asynccontextmanager
async def load(url: str, rate: float, tokens: int = 24) -> AsyncIterator[None]:
    """``rate`` requests a second while it is open, at random times."""
    draw = random.Random(7)

    async def ask(client: httpx.AsyncClient) -> None:
        own = " ".join(str(draw.randrange(99)) for _ in range(draw.randrange(60)))
        body = {"model": "baton-demo", "prompt": f"{draw.choice(HEADS)}numbers = [{own}"}
        with contextlib.suppress(httpx.HTTPError):  # the page shows how it went
            await client.post("/v1/completions", json={**body, "max_tokens": tokens})

    async def arrive(client: httpx.AsyncClient) -> None:
        async with asyncio.TaskGroup() as asking:
            while True:
                asking.create_task(ask(client))
                await asyncio.sleep(draw.expovariate(rate))

    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        arriving = asyncio.create_task(arrive(client))
        try:
            yield
        finally:
            arriving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await arriving
