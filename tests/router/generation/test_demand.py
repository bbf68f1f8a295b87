"""What routers tell of the requests that come, and what those are made of."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.generation.metrics import TOKEN_BUCKETS
from tests.router.conftest import Cluster, Start, until
from tests.router.fake_worker import outputs

RECEIVED = "baton_requests_received_total"
OF = ("prompt", "uncached_prompt", "output")


async def samples(cluster: Cluster) -> dict[str, float]:
    """Of a request's lengths, by name: observations, and their sum."""
    page = (await cluster.client.get("/metrics")).text
    return {
        s.name: s.value
        for family in text_string_to_metric_families(page)
        for s in family.samples
        if "le" not in s.labels
    }


def lengths(found: dict[str, float]) -> dict[str, tuple[float, float]]:
    names = {of: f"baton_request_{of}_tokens" for of in OF}
    return {of: (found[f"{name}_count"], found[f"{name}_sum"]) for of, name in names.items()}


def test_edges_are_a_square_root_of_two_apart() -> None:
    assert (TOKEN_BUCKETS[0], TOKEN_BUCKETS[-1]) == (16, 131072)
    for below, above in pairwise(TOKEN_BUCKETS):
        assert above / below == pytest.approx(2**0.5, rel=0.02)


async def test_lengths_of_a_request(start: Start) -> None:
    cluster = await start(outputs(cached=3))
    await cluster.post(prompt=[5, 6, 7, 8], max_tokens=5)
    found = await samples(cluster)
    assert found[RECEIVED] == 1
    assert lengths(found) == {"prompt": (1, 4), "uncached_prompt": (1, 1), "output": (1, 5)}


async def test_an_output_is_counted_at_each_edge_that_it_passes(start: Start) -> None:
    cluster = await start(outputs())
    await cluster.post(prompt=[5], max_tokens=33)
    await cluster.post(prompt=[5], max_tokens=16)
    found = await samples(cluster)
    assert found["baton_request_passed_output_tokens_count"] == 3
    assert found["baton_request_passed_output_tokens_sum"] == 16 + 23 + 32


async def test_each_choice_is_a_request(start: Start) -> None:
    cluster = await start(outputs())
    await cluster.post(prompt=[[5, 6], [7, 8, 9]], n=3, max_tokens=2)
    found = await samples(cluster)
    assert found[RECEIVED] == 6
    assert lengths(found)["prompt"] == (6, 15)


async def test_what_is_wrong_is_no_demand(start: Start) -> None:
    cluster = await start(outputs(), max_requests=3)
    for wrong in (
        {"prompt": ""},
        {"prompt": [10**8]},
        {"prompt": "hi", "max_tokens": 10**6},
        {"prompt": "hi", "n": 4},
    ):
        assert (await cluster.post(**wrong)).status_code == 400
    assert (await samples(cluster))[RECEIVED] == 0


async def test_refused_ones_count(start: Start) -> None:
    cluster = await start(outputs(delay=0.3), max_requests=4)
    first = asyncio.create_task(cluster.post(prompt=[5], max_tokens=2))
    await until(lambda: bool(cluster.workers[0].requests))
    assert (await cluster.post(prompt=[6, 7], n=4)).status_code == 429
    await first
    found = await samples(cluster)
    assert found[RECEIVED] == 5
    assert lengths(found)["output"] == (1, 2)


async def test_known_with_the_first_token(start: Start) -> None:
    cluster = await start(outputs(delay=0.15, cached=1))
    task = asyncio.create_task(cluster.post(prompt=[5, 6], max_tokens=3))
    await until(lambda: bool(cluster.workers[0].requests))
    found = await samples(cluster)
    assert found[RECEIVED] == 1
    assert lengths(found) == {"prompt": (1, 2), "uncached_prompt": (0, 0), "output": (0, 0)}
    await asyncio.sleep(0.2)
    found = await samples(cluster)
    assert lengths(found) == {"prompt": (1, 2), "uncached_prompt": (1, 1), "output": (0, 0)}
    assert found["baton_uncached_prompt_tokens_total"] == 1
    assert found["baton_prompt_cached_pairs_total"] == 1  # one uncached, one cached token
    assert found["baton_ended_prompt_tokens_total"] == 0
    await task
    found = await samples(cluster)
    assert found["baton_ended_prompt_tokens_total"] == 2
    assert found["baton_prompt_output_pairs_total"] == 6


async def test_those_that_no_worker_can_take_count(start: Start) -> None:
    cluster = await start()
    assert (await cluster.post(prompt="hi", n=2)).status_code == 503
    assert (await samples(cluster))[RECEIVED] == 2
