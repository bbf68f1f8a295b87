"""A worker's own metrics page, over real engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from cluster.local.redis_server import EmbeddedRedis
from cluster.worker.worker import Worker
from protocol.errors import StartupError
from protocol.requests import Request
from protocol.sampling_params import SamplingParams
from tests.workers.harness import attached, running, settings

PROMPT = tuple(range(1, 101))
SAMPLING = SamplingParams(max_tokens=9, ignore_eos=True)
REQUEST = Request(id="a", prompt=PROMPT, sampling=SAMPLING, cache_root=b"r" * 16)
Samples = dict[str, dict[frozenset[tuple[str, str]], float]]


async def scrape(worker: Worker) -> Samples:
    """Values by name and labels, those of histograms' buckets left out."""
    url = f"http://{worker.record().metrics_endpoint}/metrics"
    async with aiohttp.ClientSession() as client, client.get(url) as reply:
        assert reply.status == 200
        assert reply.headers["content-type"].startswith("text/plain; version=")
        page = await reply.text()
    found: Samples = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = frozenset(sample.labels.items())
            assert labels not in found.setdefault(sample.name, {}), sample
            found[sample.name][labels] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    """Of the one series with these labels, whatever others it has."""
    matching = [v for k, v in samples[name].items() if set(labels.items()) <= k]
    assert len(matching) == 1, (name, samples[name])
    return matching[0]


async def test_both_roles(redis: EmbeddedRedis, model: Path) -> None:
    wanted = settings("prefill", redis, model), settings("decode", redis, model)
    async with running(*wanted) as [p, d], attached(d, p) as client:
        await client.ask(REQUEST)
        await asyncio.sleep(0.7)  # a beat
        at_p, at_d = await scrape(p), await scrape(d)
    one = {"model": "tiny", "role": "prefill"}
    assert value(at_p, "baton_prefill_computed_tokens_total", **one) == len(PROMPT)
    assert value(at_p, "baton_generation_tokens_total", **one) == 1
    assert value(at_p, "baton_prefix_cache_queries_tokens_total", **one) == len(PROMPT)
    assert value(at_p, "baton_prefix_cache_hits_tokens_total", **one) == 0
    one["role"] = "decode"
    assert value(at_d, "baton_prefill_computed_tokens_total", **one) == 0
    assert value(at_d, "baton_generation_tokens_total", **one) == 8
    assert value(at_d, "baton_engine_step_seconds_count", **one) == 8
    assert value(at_d, "baton_engine_batch_size_sum", **one) == 8
    assert value(at_d, "baton_engine_step_seconds_sum", **one) > 0
    raw = {**one, "transport": "local", "codec": "raw"}
    assert value(at_d, "baton_kv_transfer_bytes_total", **raw) > 1000
    assert value(at_d, "baton_kv_transfer_seconds_count", **raw) == 1
    assert value(at_d, "baton_kv_transfer_failures_total", **raw) == 0
    assert value(at_d, "baton_requests_running", replica=d.instance[:12]) == 0
    assert value(at_p, "baton_kv_slots_held") == value(at_d, "baton_kv_slots_held") == 0
    assert 0 <= value(at_d, "baton_kv_cache_usage_ratio") <= 1
    assert value(at_d, "process_resident_memory_bytes") > 1e6
    assert value(at_d, "baton_engine_process_resident_memory_bytes") > 1e6
    shown = [name for name in at_d if name.startswith("baton_") and "process" not in name]
    assert len(shown) > 20
    assert not any("request_id" in dict(k) for name in shown for k in at_d[name])


@pytest_asyncio.fixture(scope="module")
async def alone(shared_redis: EmbeddedRedis, model: Path) -> AsyncIterator[Worker]:
    async with running(settings("decode", shared_redis, model)) as [worker]:
        yield worker


async def test_engines_that_died_stay_counted(alone: Worker) -> None:
    d = alone
    async with attached(d) as client:
        await client.ask(REQUEST)
        await asyncio.sleep(0.7)
        session = d._engine.current
        assert session is not None
        session.process.kill()
        async with asyncio.timeout(30):
            while d._engine.restarts == 0:
                await asyncio.sleep(0.05)
        found = await scrape(d)
    assert value(found, "baton_generation_tokens_total") == 9
    assert value(found, "baton_engine_restarts_total") == 1


async def test_only_that_page(alone: Worker, shared_redis: EmbeddedRedis, model: Path) -> None:
    url = f"http://{alone.record().metrics_endpoint}"
    async with aiohttp.ClientSession() as client:
        assert (await client.get(f"{url}/")).status == 404
        assert (await client.post(f"{url}/metrics")).status == 405
    port = int(alone.record().metrics_endpoint.rpartition(":")[2])
    with pytest.raises(StartupError, match=f"metrics on 127.0.0.1:{port}"):
        async with running(settings("decode", shared_redis, model, metrics_port=port)):
            pass
