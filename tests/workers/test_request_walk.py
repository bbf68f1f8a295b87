"""A streamed chat request passes through few modules, so that a reader can follow it."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from random import Random

import httpx
import pytest

from bench.lib.settings import router_settings
from cluster.local.redis_server import EmbeddedRedis
from cluster.models.locate import demo_path
from router.http.server import HostedRouter
from router.placement.choose import PlacementChoice, choose_placement
from router.placement.snapshot import Objectives, PlacementQuery, PlacementSnapshot
from tests.request_walk import RequestWalk
from tests.router.conftest import until
from tests.workers.harness import TOKEN, running, settings

MODULES_AT_MOST = 155
REQUESTS = 4
IDLE_S = 2.0


def with_hand_over(
    query: PlacementQuery, snapshot: PlacementSnapshot, goals: Objectives, rng: Random
) -> PlacementChoice | None:
    """Choose as the product does, but always compute the prompt in the prefill pool."""
    choice = choose_placement(query, snapshot, goals, rng)
    assert choice is not None
    chosen = min((c for c in choice.considered if c.prefill is not None), key=lambda c: c.cost)
    return choice._replace(chosen=chosen, others=[])


async def stream_chat(client: httpx.AsyncClient, topic: int) -> None:
    """Ask with a prompt that no cache holds, and read the stream to its end."""
    text = f"{topic} {topic * 7919} " + "def main(argument): return argument + 1\n" * 12
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "stream": True}
    reply = await client.post(
        "/v1/chat/completions", json={**body, "max_tokens": 12, "ignore_eos": True}, timeout=60
    )
    assert reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n"), reply.text


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


async def test_chat_request_passes_through_155_modules_at_most(
    redis: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.generation.placer.choose_placement", with_hand_over)
    roles = ("prefill", "decode")
    changes = {"model_id": "demo", "engine_module": "tests.request_walk"}
    pool_settings = [settings(role, redis, demo_path(), **changes) for role in roles]
    folder = tmp_path / "walk"
    folder.mkdir()
    walk, port = RequestWalk(folder), free_port()
    with walk.tracing():
        async with running(*pool_settings):
            router = HostedRouter(
                router_settings(
                    **{"cluster": "test", "redis_url": redis.url, "token": TOKEN},
                    **{"secret": b"s" * 32, "model_path": str(demo_path()), "model_id": "demo"},
                ),
                *("127.0.0.1", port, 1.0),
            )
            await router.start()
            pool = router._app.state.router.pool
            await until(lambda: pool.attached == 1 and len(pool.prefill) == 1)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                await stream_chat(client, 0)  # loads and compiles what is needed once
                for topic in range(1, 1 + REQUESTS):
                    with walk.request():
                        await stream_chat(client, topic)
                with walk.idle():
                    await asyncio.sleep(IDLE_S)
            await router.stop()
    modules = walk.modules()
    for place, (path, functions) in enumerate(modules.items(), 1):
        print(f"{place:3} {path}: {', '.join(functions)}")
    for path in ("router/http/response.py", "engine/execution/engine.py", "kvtransfer/inbound.py"):
        assert path in modules
    assert len(modules) <= MODULES_AT_MOST
