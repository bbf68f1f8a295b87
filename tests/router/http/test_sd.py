from __future__ import annotations

import asyncio
import re
from pathlib import Path

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from cluster.local.redis_server import EmbeddedRedis
from protocol.registry.directory import (
    AutoscalerRecord,
    Directory,
    ModelInfo,
    RouterRecord,
    WorkerRecord,
)
from protocol.registry.redis_client import connect
from router.http.service_discovery import RouterRegistration, target_groups
from router.settings import RouterSettings
from tests.router.conftest import Start
from tests.router.fake_worker import outputs

LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def worker(model: ModelInfo, role: str, metrics: str) -> WorkerRecord:
    return WorkerRecord(
        instance=f"{role}-1",
        role=role,
        endpoint="127.0.0.1:1",
        kv_endpoint="127.0.0.1:2",
        model=model,
        pid=3,
        engine_pid=4,
        metrics_endpoint=metrics,
    )


def test_the_format_of_http_sd(model_info: ModelInfo) -> None:
    lent = msgspec.structs.replace(worker(model_info, "decode", "127.0.0.1:9"), home="prefill")
    workers = [lent, worker(model_info, "prefill", "")]
    router = RouterRecord(instance="r", model="tiny", metrics_endpoint="[fd00::1]:8", pid=5)
    scaler = AutoscalerRecord(instance="a", model="tiny", metrics_endpoint="h:1", pid=6)
    found = target_groups(workers, [router, scaler], "c", tls=True)
    assert [g["targets"] for g in found] == [["127.0.0.1:9"], ["[fd00::1]:8"], ["h:1"]]
    for group in found:
        assert group.keys() == {"targets", "labels"}
        assert all(LABEL.fullmatch(k) and isinstance(v, str) for k, v in group["labels"].items())
    assert [g["labels"]["__scheme__"] for g in found] == ["http", "https", "https"]
    assert found[0]["labels"]["__meta_baton_role"] == "decode"
    assert found[0]["labels"]["__meta_baton_home"] == "prefill"
    assert found[0]["labels"]["__meta_baton_engine_pid"] == "4"
    assert found[1]["labels"]["__meta_baton_role"] == "router"
    assert found[2]["labels"]["__meta_baton_role"] == "autoscaler"


async def test_the_endpoint(start: Start) -> None:
    cluster = await start(outputs())
    reply = await cluster.client.get("/sd")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    [group] = reply.json()  # the fake worker has no metrics
    assert group["labels"]["__meta_baton_role"] == "router"
    url = f"http://{group['targets'][0]}/metrics"
    async with aiohttp.ClientSession() as client, client.get(url) as page:
        text = await page.text()
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {"baton_requests_running", "baton_replicas", "process_cpu_seconds"} <= names


async def test_routers_find_each_other(settings: RouterSettings, tmp_path: Path) -> None:
    redis = EmbeddedRedis(tmp_path)
    redis.start()
    client = connect(redis.url)
    one, two = (RouterRegistration(settings, lambda: b"") for _ in range(2))
    await one.start(client)
    await two.start(client)
    listed = Directory(client, settings.cluster).routers
    async with asyncio.timeout(5):
        while len(await listed.all()) < 2:
            await asyncio.sleep(0.01)
    assert {r.instance for r in await one.list_processes()} == {one.instance, two.instance}
    record = AutoscalerRecord(instance="a", model="tiny", metrics_endpoint="127.0.0.1:9", pid=6)
    await Directory(client, settings.cluster).autoscalers.renew(record)
    assert record in await one.list_processes()
    await Directory(client, settings.cluster).autoscalers.remove("a")
    await two.close()
    assert [r.instance for r in await one.list_processes()] == [one.instance]
    redis.stop()
    assert [r.instance for r in await one.list_processes()] == [one.instance]
    await one.close()
    await client.aclose()
