"""Streams that wait: their head and keep-alives, over a real HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from protocol.wire import wire_pb2 as pb
from tests.router.conftest import MODEL, Cluster, Start, served, until
from tests.router.fake_worker import outputs, silent

COMMENT = ": keep-alive\n\n"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


async def stalling(request: pb.Request) -> AsyncIterator[pb.Output]:
    """A script: silence before the first token, and again after it."""
    for at, token in enumerate(request.prompt[:3]):
        await asyncio.sleep(0.5 if at < 2 else 0.0)
        finish = pb.FINISH_LENGTH if at == 2 else pb.FINISH_NONE
        yield pb.Output(id=request.id, tokens=[token], finish=finish)


def counted(cluster: Cluster, status: str) -> float:
    metrics = cluster.app.state.router.metrics
    value = metrics.registry.get_sample_value(
        "baton_requests_total", {"status": status, "model": MODEL, "role": "router"}
    )
    return value or 0.0


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_silent_stream_is_kept_alive(start: Start, choices: int) -> None:
    cluster = await start(stalling, keep_alive_s=0.2)
    async with (
        served(cluster.app) as url,
        httpx.AsyncClient() as client,
        client.stream(
            "POST", f"{url}/v1/chat/completions", json={**CHAT, "stream": True, "n": choices}
        ) as response,
    ):
        assert response.status_code == 200
        assert not any(
            link.load().own == 0 for link in cluster.app.state.router.pool.links.values()
        )
        text = (await response.aread()).decode()
    before, after = text.split("data: ", 1)
    assert before == before.count(COMMENT) * COMMENT and COMMENT in before
    assert COMMENT in after and after.endswith("data: [DONE]\n\n")
    assert text.count('"finish_reason":"length"') == choices


async def test_a_whole_answer_gets_no_keep_alives(start: Start) -> None:
    cluster = await start(stalling, keep_alive_s=0.1)
    async with served(cluster.app) as url, httpx.AsyncClient() as client:
        response = await client.post(f"{url}/v1/chat/completions", json=CHAT)
    assert response.content.startswith(b"{")
    assert "content-length" in response.headers


async def test_an_early_error_has_its_status_and_a_late_one_is_an_event(start: Start) -> None:
    cluster = await start(silent, first_token_timeout_s=0.3, keep_alive_s=0.1)
    request = {"model": MODEL, "prompt": "hi", "stream": True}
    late = await cluster.client.post("/v1/completions", json=request)
    assert (late.status_code, '"code":"timeout"' in late.text) == (200, True)
    assert "[DONE]" not in late.text
    assert counted(cluster, "504") == 1
    cluster = await start(silent, first_token_timeout_s=0.1)
    early = await cluster.client.post("/v1/completions", json=request)
    assert early.status_code == 504


async def test_a_client_that_hangs_up_between_keep_alives_frees_the_worker(start: Start) -> None:
    cluster = await start(silent, keep_alive_s=0.1)
    async with served(cluster.app) as url, httpx.AsyncClient() as client:
        async with client.stream(
            "POST", f"{url}/v1/chat/completions", json={**CHAT, "stream": True}
        ) as response:
            assert (await anext(response.aiter_text())) == COMMENT
        await until(lambda: len(cluster.workers[0].cancelled) == 1, 1.0)
        await until(lambda: counted(cluster, "cancelled") == 1, 1.0)


async def test_a_prompt_counts_as_used_with_its_first_token_only(start: Start) -> None:
    cluster = await start(outputs(delay=0.5), keep_alive_s=0.1, first_token_timeout_s=0.3)
    answer = await cluster.chat(stream=True)
    assert answer.text.startswith(COMMENT)
    book = cluster.app.state.router.tenants.book
    assert [usage.prompt_tokens for usage in book.own().values()] == [0]
