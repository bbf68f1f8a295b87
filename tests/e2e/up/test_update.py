"""A second `baton up` updates the cluster that runs on this machine."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from bench.lib.local_cluster import LocalCluster, baton
from tests.e2e.conftest import workers

pytestmark = [pytest.mark.e2e, pytest.mark.system, pytest.mark.timeout(240)]

OPTIONS = ("--threads", "1", "--prefill-chunk", "128", "--kv-precision", "exact")
BODY = {"model": "baton-demo", "max_tokens": 100, "stream": True, "ignore_eos": True}


async def stream(client: httpx.AsyncClient, prompt: str) -> bool:
    """Return whether the stream is complete."""
    answer = await client.post("/v1/completions", json={**BODY, "prompt": prompt})
    text = answer.text
    return (
        answer.status_code == 200 and '{"error"' not in text and text.endswith("data: [DONE]\n\n")
    )


async def test_what_changed_is_replaced_and_no_stream_is_lost(cluster: LocalCluster) -> None:
    before = {(w.role, w.instance) for w in await workers(cluster)}
    updating = asyncio.create_task(
        asyncio.to_thread(baton, cluster.home, "up", "--detach", *OPTIONS, "--decode-max-batch=32")
    )
    complete: list[bool] = []
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        while not updating.done():
            prompt = f"def f{len(complete)}(x):"
            complete.append(await stream(client, prompt))
    said = await updating
    assert "updating it" in said and "decode: replaced, max_batch default -> 32\n" in said
    assert complete and all(complete)
    after = {(w.role, w.instance) for w in await workers(cluster)}
    kept = {role for role, _ in before & after}
    assert kept == {"prefill"} and len(after) == len(before)


async def test_an_update_names_what_a_scale_had_changed_and_refuses_what_does_not_fit(
    cluster: LocalCluster,
) -> None:
    await asyncio.to_thread(baton, cluster.home, "scale", "prefill=2")
    command = ("up", "--detach", *OPTIONS, "--decode-max-batch=32")
    said = await asyncio.to_thread(baton, cluster.home, *command)
    assert "prefill: 2 -> 1 workers, as configured (pools.prefill.workers)\n" in said
    assert "nothing has changed" in await asyncio.to_thread(baton, cluster.home, *command)
    with pytest.raises(RuntimeError, match=r"prefill=1000 needs .*nothing was changed"):
        await asyncio.to_thread(baton, cluster.home, *command, "--prefill", "1000")


async def test_what_an_update_cannot_change_is_refused(cluster: LocalCluster) -> None:
    with pytest.raises(RuntimeError, match=r"router\.port cannot change .*baton down`"):
        await asyncio.to_thread(baton, cluster.home, "up", "--detach", *OPTIONS, "--port", "1")
