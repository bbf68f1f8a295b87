"""Where the time to first token goes, over one prefill and one decode worker."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.lib.routing_policies import least_loaded
from bench.lib.settings import router_settings
from cluster.local.redis_server import EmbeddedRedis
from cluster.models.locate import demo_path
from router.http.app import create_app
from tests.router.conftest import until
from tests.workers.harness import TOKEN, running, settings

pytestmark = pytest.mark.alone

EVENTS = ["arrived", "routed", "prefill_queued", "prefill_started", "first_token", "kv_ready"]
EVENTS += ["decode_started", "finished"]


def sums(page: str) -> dict[str, float]:
    """Of the histograms' seconds, by stage; "" for the whole."""
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == "baton_ttft_stage_seconds_sum":
                found[sample.labels["stage"]] = sample.value
            elif sample.name == "baton_time_to_first_token_seconds_sum":
                found[""] = sample.value
    return found


async def test_stages_add_up(redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.generation.placer.choose_placement", least_loaded)
    model = demo_path()
    wanted = (
        settings("prefill", redis, model, model_id="demo"),
        settings("decode", redis, model, model_id="demo"),
    )
    app = create_app(
        router_settings(
            cluster="test",
            redis_url=redis.url,
            token=TOKEN,
            secret=b"s" * 32,
            model_path=str(model),
            model_id="demo",
            refresh_s=0.1,
        )
    )
    transport = httpx.ASGITransport(app)
    async with (
        running(*wanted),
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client,
    ):
        pool = app.state.router.pool
        await until(lambda: pool.attached == len(pool.prefill) == 1)

        async def ask(seed: int, headers: dict[str, str]) -> dict[str, Any]:
            prompt = [5 + (i * 7 + seed * 131) % 900 for i in range(400)]
            body = {"model": "demo", "prompt": prompt, "max_tokens": 6, "ignore_eos": True}
            async with asyncio.timeout(30):
                reply = await client.post("/v1/completions", json=body, headers=headers)
            assert reply.status_code == 200, reply.text
            return dict(reply.json())

        for seed in range(4):
            began = time.perf_counter()
            answer = await ask(seed, {"x-baton-timeline": "1"})
            took = time.perf_counter() - began
            [timeline] = answer["baton"].pop("timeline")
            assert not answer["baton"]  # no explanation was asked for
            assert list(timeline) == EVENTS
            assert list(timeline.values()) == sorted(timeline.values())
            assert timeline["arrived"] == 0 <= timeline["finished"] <= took
        assert "baton" not in await ask(9, {})
        found = sums((await client.get("/metrics")).text)
    assert found.keys() == {"", "route", "queue", "prefill", "first_emit", "wire", "scatter"}
    before_first = ["route", "queue", "prefill", "first_emit"]
    assert sum(found[stage] for stage in before_first) == pytest.approx(found[""], rel=0.02)
    assert found["prefill"] > 0.3 * found[""]  # of 400 tokens: it is what is waited for
