"""`baton scale` on a cluster of one machine, while streams run: none is lost, none is changed."""

from __future__ import annotations

import asyncio

import pytest

from bench.lib.local_cluster import LocalCluster, baton
from bench.lib.oracle import Oracle
from tests.e2e.conftest import workers
from tests.e2e.up.test_cluster import as_request, body, http, prompts, stream

pytestmark = [pytest.mark.e2e, pytest.mark.system, pytest.mark.timeout(240)]


async def scaled(cluster: LocalCluster, *counts: str) -> str:
    return await asyncio.to_thread(baton, cluster.home, "scale", *counts)


async def refused(cluster: LocalCluster, *counts: str) -> str:
    with pytest.raises(RuntimeError) as error:
        await scaled(cluster, *counts)
    return str(error.value)


async def test_counts_that_do_not_fit_are_refused_before_anything_starts(
    cluster: LocalCluster,
) -> None:
    before = await running(cluster)
    said = await refused(cluster, "prefill=1000")
    assert "prefill=1000 needs" in said and "fits; nothing was changed" in said
    assert "routers: 1 -> 9 is a large change" in await refused(cluster, "routers=9")
    assert await running(cluster) == before


async def running(cluster: LocalCluster) -> dict[str, int]:
    roles = [worker.role for worker in await workers(cluster) if not worker.draining]
    return {role: roles.count(role) for role in ("prefill", "decode")}


async def test_up_and_down_under_streams(cluster: LocalCluster, oracle: Oracle) -> None:
    before = await running(cluster)
    said = await scaled(cluster, "prefill=2", "decode=2", "routers=2")
    assert said.splitlines()[-1] == "prefill 1 -> 2, decode 1 -> 2, router 1 -> 2"
    assert await running(cluster) == {"prefill": 2, "decode": 2}
    sent = [body(cluster, i, p, 400) for i, p in enumerate(prompts(8, 40, 400, seed=11))]
    async with http(cluster) as client:
        streams = [asyncio.create_task(stream(client, request)) for request in sent]
        await asyncio.sleep(0.3)
        await scaled(cluster, "prefill=1", "decode=1", "routers=1")
        answers = await asyncio.gather(*streams)
    assert [tokens for tokens, _ in answers] == oracle([as_request(s) for s in sent])
    assert await running(cluster) == before == {"prefill": 1, "decode": 1}
