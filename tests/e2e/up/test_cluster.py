"""A running cluster, used and hurt as people and machines do."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.lib.local_cluster import LocalCluster
from bench.lib.oracle import Oracle
from cluster.models.locate import demo_path
from protocol.requests import Request
from protocol.sampling_params import SamplingParams
from tests.e2e.conftest import worker, workers

pytestmark = [pytest.mark.e2e, pytest.mark.system, pytest.mark.timeout(240)]


def prompts(count: int, low: int, high: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [
        [draw.randrange(3, 4096) for _ in range(draw.randrange(low, high))] for _ in range(count)
    ]


def body(cluster: LocalCluster, i: int, prompt: list[int], tokens: int = 32) -> dict[str, Any]:
    """Every other request is sampled, with a seed."""
    return {
        "model": cluster.state.model_id,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.8 if i % 2 else 0,
        "top_p": 0.95 if i % 4 == 3 else 1.0,
        "seed": i,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def as_request(sent: dict[str, Any]) -> Request:
    sampling = SamplingParams(
        temperature=sent["temperature"],
        top_p=sent["top_p"],
        seed=sent["seed"],
        max_tokens=sent["max_tokens"],
        ignore_eos=True,
    )
    return Request(id="x", prompt=tuple(sent["prompt"]), sampling=sampling, cache_root=bytes(16))


async def stream(client: httpx.AsyncClient, sent: dict[str, Any]) -> tuple[list[int], str]:
    """Tokens and text of a streamed completion; fails when it ends without [DONE]."""
    tokens: list[int] = []
    text, done = "", False
    async with client.stream("POST", "/v1/completions", json={**sent, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                chunk = httpx.Response(200, content=line[6:]).json()
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    tokens += choice.get("token_ids") or []
                    text += choice["text"]
    assert done, "the stream ended without [DONE]"
    return tokens, text


def http(cluster: LocalCluster) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=cluster.url, timeout=120)


async def test_streams_are_what_one_engine_gives(cluster: LocalCluster, oracle: Oracle) -> None:
    """48 prompts, 16 at a time, greedy and seeded."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_path() / "tokenizer.json"))
    sent = [body(cluster, i, p) for i, p in enumerate(prompts(48, 1, 400, seed=1))]
    room = asyncio.Semaphore(16)
    async with http(cluster) as client:

        async def one(request: dict[str, Any]) -> tuple[list[int], str]:
            async with room:
                return await stream(client, request)

        answers = await asyncio.gather(*(one(s) for s in sent))
    assert [tokens for tokens, _ in answers] == oracle([as_request(s) for s in sent])
    for tokens, text in answers:
        assert text == tokenizer.decode(tokens)


async def test_whole_answers_are_the_streamed_ones(cluster: LocalCluster) -> None:
    sent = body(cluster, 1, prompts(1, 200, 201, seed=2)[0])
    async with http(cluster) as client:
        whole = (await client.post("/v1/completions", json=sent)).json()
        assert whole["choices"][0]["text"] == (await stream(client, sent))[1]
        assert whole["usage"]["completion_tokens"] == 32


async def test_prefill_worker_killed_while_requests_are_in_it(
    cluster: LocalCluster, oracle: Oracle
) -> None:
    sent = [body(cluster, i, p) for i, p in enumerate(prompts(8, 900, 1000, seed=3))]
    victim = await worker(cluster, "prefill")
    async with http(cluster) as client:
        streams = [asyncio.create_task(stream(client, s)) for s in sent]
        await asyncio.sleep(0.15)
        os.kill(victim.pid, signal.SIGKILL)
        answers = await asyncio.gather(*streams)
    assert [tokens for tokens, _ in answers] == oracle([as_request(s) for s in sent])
    async with asyncio.timeout(60):  # Serve puts another in its place
        while not any(
            w.role == "prefill" and w.instance != victim.instance for w in await workers(cluster)
        ):
            await asyncio.sleep(0.2)
        ended = f"prefill replica, pid {victim.pid}, ended unexpectedly: "
        while ended not in (cluster.home / "default" / "baton.log").read_text():
            await asyncio.sleep(0.2)


async def test_client_that_hangs_up_frees_the_pages(cluster: LocalCluster) -> None:
    sent = body(cluster, 0, prompts(1, 1500, 1501, seed=4)[0], tokens=2000)
    async with http(cluster) as client:
        task = asyncio.create_task(stream(client, sent))
        async with asyncio.timeout(5):  # until the directory shows pages in use
            while all(w.kv_tokens_free == w.kv_tokens_total for w in await workers(cluster)):
                await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
    hung_up = time.monotonic()
    while any(w.kv_tokens_free < w.kv_tokens_total for w in await workers(cluster)):
        # Pages are free within 2 s; the directory learns of it one beat and one renewal later.
        assert time.monotonic() - hung_up < 2.0 + 1.5
        await asyncio.sleep(0.05)


async def test_openai_client_streams(cluster: LocalCluster) -> None:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        parts = await client.completions.create(
            model=cluster.state.model_id, prompt="def fibonacci(n):", max_tokens=32, stream=True
        )
        text = "".join([part.choices[0].text async for part in parts if part.choices])
    assert text.strip()


def test_only_engines_have_torch(cluster: LocalCluster) -> None:
    fronts = [p for p in cluster.processes() if "cluster.worker.engine_main" not in p.cmdline()]
    assert len(fronts) > 5
    for process in fronts:
        maps = Path(f"/proc/{process.pid}/maps")
        assert not maps.exists() or "libtorch" not in maps.read_text(), process.cmdline()


def test_ray_runs_only_what_is_needed(cluster: LocalCluster) -> None:
    commands = [" ".join(process.cmdline()) for process in cluster.processes()]
    assert any("raylet" in command for command in commands)
    for unused in ("dashboard/dashboard.py", "_private/monitor.py", "log_monitor.py"):
        assert not any(unused in command for command in commands), unused


async def test_request_id_is_given_once(cluster: LocalCluster) -> None:
    async with http(cluster) as client:
        response = await client.get("/v1/models")
    assert len(response.headers.get_list("x-request-id")) == 1
