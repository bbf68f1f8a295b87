"""A streamed chat request passes through few modules: a reader can follow it."""

from __future__ import annotations

from pathlib import Path

import httpx

from cluster.local.redis_server import EmbeddedRedis
from cluster.models.models import demo_path
from router.http.server import HostedRouter
from router.settings import RouterSettings
from tests.request_walk import RequestWalk
from tests.router.conftest import until
from tests.workers.harness import TOKEN, running, settings

MODULES_AT_MOST = 80
REQUESTS = 4
PORT = 18931


def router_settings(redis: EmbeddedRedis) -> RouterSettings:
    return RouterSettings(
        cluster="test",
        redis_url=redis.url,
        token=TOKEN,
        secret=b"s" * 32,
        model_path=str(demo_path()),
        model_id="demo",
        refresh_s=0.1,
        routing_policy="round-robin",  # the prompt goes to the prefill pool, whatever it would cost
    )


async def chat(client: httpx.AsyncClient, topic: int) -> str:
    """Ask with a prompt that no cache holds; return the stream."""
    text = f"{topic} {topic * 7919} " + "def main(argument): return argument + 1\n" * 12
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "stream": True}
    reply = await client.post(
        "/v1/chat/completions", json={**body, "max_tokens": 12, "ignore_eos": True}, timeout=60
    )
    assert reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n"), reply.text
    return reply.text


async def test_chat_request_passes_through_80_modules_at_most(
    redis: EmbeddedRedis, tmp_path: Path
) -> None:
    folder = tmp_path / "walk"
    folder.mkdir()
    walk = RequestWalk(folder)
    roles = ("prefill", "decode")
    wanted = [settings(role, redis, demo_path(), model_id="demo") for role in roles]
    with walk.tracing():
        async with running(*wanted):
            router = HostedRouter(router_settings(redis), "127.0.0.1", PORT, 1.0)
            await router.start()
            state = router._app.state.router
            await until(lambda: state.pool.attached == 1 and len(state.pool.prefill) == 1)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}") as client:
                await chat(client, 0)
                for topic in range(1, 1 + REQUESTS):
                    with walk.request():
                        await chat(client, topic)
            await router.stop()
    found = walk.modules()
    for place, path in enumerate(found, 1):
        print(f"{place:3} {path}")
    assert len(found) <= MODULES_AT_MOST
