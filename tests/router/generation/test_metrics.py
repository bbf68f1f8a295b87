from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from tests.router.conftest import Cluster, Start, served, until
from tests.router.fake_worker import outputs, silent
from tests.router.http.api.test_stream import hang_up


async def samples(cluster: Cluster) -> dict[tuple[str, str], float]:
    """By name and status."""
    page = (await cluster.client.get("/metrics")).text
    return {
        (s.name, s.labels.get("status", "")): s.value
        for family in text_string_to_metric_families(page)
        for s in family.samples
        if "le" not in s.labels and s.labels.get("model") == "tiny"
    }


async def test_a_request_is_counted(start: Start) -> None:
    cluster = await start(outputs(delay=0.01, cached=3))
    await cluster.post(prompt=[5, 6, 7, 8], max_tokens=5)
    await cluster.post(prompt="")
    found = await samples(cluster)
    assert found["baton_requests_total", "ok"] == 1
    assert found["baton_requests_total", "400"] == 1
    assert found["baton_prompt_tokens_total", ""] == 4
    assert found["baton_uncached_prompt_tokens_total", ""] == 1
    assert found["baton_output_tokens_total", ""] == 5
    assert found["baton_time_to_first_token_seconds_count", ""] == 1
    assert found["baton_inter_token_latency_seconds_count", ""] == 4
    assert found["baton_request_time_per_output_token_seconds_count", ""] == 1
    assert 0.005 <= found["baton_request_time_per_output_token_seconds_sum", ""] < 1
    assert found["baton_request_duration_seconds_count", ""] == 1
    assert found["baton_requests_running", ""] == found["baton_requests_waiting", ""] == 0
    assert found["baton_router_decode_workers", ""] == 1


async def test_objectives(start: Start) -> None:
    cluster = await start(outputs())
    page = (await cluster.client.get("/metrics")).text
    objectives = {
        sample.labels["slo"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "baton_objective_seconds"
    }
    wanted = cluster.settings
    assert objectives == {"ttft": wanted.ttft_slo_s, "tpot": wanted.tpot_slo_s}


async def test_clients_that_wait_in_vain_miss_the_objective(start: Start) -> None:
    cluster = await start(silent, ttft_slo_s=0.05)
    async with served(cluster.app) as url:
        await hang_up(url, after_bytes=False, stream=True)
        await until(lambda: len(cluster.workers[0].cancelled) == 1)
    page = (await cluster.client.get("/metrics")).text
    of = 'model="tiny",role="router",slo="ttft"'
    assert f"baton_slo_requests_total{{{of}}} 1.0" in page
    assert f"baton_slo_met_total{{{of}}} 0.0" in page


async def test_running_and_waiting(start: Start) -> None:
    cluster = await start(outputs(delay=0.15))
    task = asyncio.create_task(cluster.post(prompt="hi", max_tokens=3))
    await until(lambda: bool(cluster.workers[0].requests))
    assert (await samples(cluster))["baton_requests_waiting", ""] == 1
    await asyncio.sleep(0.2)
    found = await samples(cluster)
    assert (found["baton_requests_running", ""], found["baton_requests_waiting", ""]) == (1, 0)
    await task


async def test_refusals_by_reason(start: Start) -> None:
    cluster = await start(outputs(delay=0.3), max_requests=1)
    first = asyncio.create_task(cluster.post(prompt="hi", max_tokens=3))
    await until(lambda: bool(cluster.workers[0].requests))
    assert (await cluster.post(prompt="hi")).status_code == 429
    await first
    body = {"model": "tiny", "prompt": "hi"}
    headers = {"x-baton-ttft-deadline-ms": "0.000001"}
    late = await cluster.client.post("/v1/completions", json=body, headers=headers)
    assert late.status_code == 429
    page = (await cluster.client.get("/metrics")).text
    refusals = {
        sample.labels["reason"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "baton_admission_refusals_total"
    }
    assert refusals == {"requests": 1, "ttft": 1, "queue": 0}


async def test_workers_by_state(start: Start) -> None:
    cluster = await start(outputs(), outputs())
    cluster.workers[0].draining = True

    async def states() -> dict[str, float]:
        page = (await cluster.client.get("/metrics")).text
        return {
            sample.labels["state"]: sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == "baton_replicas" and sample.labels["role"] == "decode"
        }

    async with asyncio.timeout(5):
        while await states() != {"ready": 1, "draining": 1, "down": 0}:
            await asyncio.sleep(0.05)
