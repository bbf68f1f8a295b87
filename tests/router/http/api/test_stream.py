"""Streams, over a real HTTP server."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from protocol.wire import wire_pb2 as pb
from tests.router.conftest import MODEL, Cluster, Start, served, until
from tests.router.fake_worker import expected, outputs, silent


async def frames(url: str, headers: dict[str, str] | None = None, **body: Any) -> list[Any]:
    """All events of a stream: parsed, ``[DONE]`` as it is."""
    request = {"model": MODEL, "stream": True, **body}
    async with (
        httpx.AsyncClient() as client,
        client.stream("POST", f"{url}/v1/completions", json=request, headers=headers) as response,
    ):
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = (await response.aread()).decode()
    events = raw.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    data = [event.removeprefix("data: ") for event in events]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def text_of(events: list[Any]) -> str:
    return "".join(c["text"] for e in events if e != "[DONE]" for c in e["choices"])


def load_of(cluster: Cluster) -> int:
    """What the router believes to have under way."""
    state = cluster.app.state.router
    books = state.ledger
    rest = books.active.total() + books.pending_kv.total() + state.admission.inside.total()
    return sum(link.load().own for link in state.pool.links.values()) + books.prompts + rest


async def test_a_stream_joins_to_the_whole_text(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(outputs(together=3, delay=0.001))
    prompt = "héllo 🦊🦊 über"
    async with served(cluster.app) as url:
        events = await frames(url, prompt=prompt, max_tokens=100)
        whole = await cluster.post(prompt=prompt, max_tokens=100)
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert len({c["id"] for c in chunks}) == 1
    assert all(c["object"] == "text_completion" and c["model"] == MODEL for c in chunks)
    assert all("usage" not in c for c in chunks)
    assert [c["choices"][0]["finish_reason"] for c in chunks[-2:]] == [None, "length"]
    assert len(chunks) > 3
    ids = expected(tokenizer.encode(prompt).ids, 100)
    assert text_of(events) == whole.json()["choices"][0]["text"] == tokenizer.decode(ids)
    assert "\ufffd" not in text_of(events)[:-1]


async def test_usage_and_token_ids(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(outputs(delay=0.001, cached=1))
    async with served(cluster.app) as url:
        events = await frames(
            url,
            prompt="🦊",
            max_tokens=9,
            return_token_ids=True,
            stream_options={"include_usage": True},
        )
    *chunks, usage, done = events
    assert done == "[DONE]"
    prompt = tokenizer.encode("🦊").ids
    assert chunks[0]["choices"][0]["prompt_token_ids"] == prompt
    assert all("prompt_token_ids" not in c["choices"][0] for c in chunks[1:])
    got = [i for c in chunks for i in c["choices"][0]["token_ids"]]
    assert got == expected(prompt, 9)
    assert all(c["usage"] is None for c in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 9
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_waiting_tokens_become_one_chunk(start: Start) -> None:
    async def burst(request: pb.Request) -> Any:
        for i in range(60):
            finish = pb.FINISH_LENGTH if i == 59 else pb.FINISH_NONE
            yield pb.Output(id=request.id, tokens=[5], finish=finish)

    cluster = await start(burst)
    async with served(cluster.app) as url:
        events = await frames(url, prompt="x", max_tokens=60, return_token_ids=True)
    assert sum(len(c["choices"][0]["token_ids"]) for c in events[:-1]) == 60
    assert len(events) < 60


async def test_nothing_of_a_stop_string_is_sent(start: Start, tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_to_id(c) for c in "abcdef"]
    cluster = await start(outputs(delay=0.005))
    async with served(cluster.app) as url:
        events = await frames(url, prompt=ids, max_tokens=600, stop="cde")
    assert [c["choices"][0]["text"] for c in events[:-1]] == ["a", "b", ""]
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1] == "[DONE]"
    await until(lambda: len(cluster.workers[0].cancelled) == 1)
    assert load_of(cluster) == 0


async def test_an_error_before_the_first_text_has_a_status(start: Start) -> None:
    cluster = await start(outputs(error_after=0, retryable=False))
    response = await cluster.post(prompt="x", stream=True)
    assert response.status_code == 500
    assert "boom" in response.json()["error"]["message"]


async def test_an_error_in_mid_stream_is_a_frame_and_there_is_no_done(start: Start) -> None:
    cluster = await start(outputs(delay=0.005, error_after=5, retryable=False))
    async with served(cluster.app) as url:
        events = await frames(url, prompt=[5, 6], max_tokens=50)
    assert "choices" in events[0]
    error = events[-1]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "worker_error"
    assert "[DONE]" not in events


async def hang_up(url: str, *, after_bytes: bool, stream: bool) -> None:
    """Start a request and close the connection."""
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 4000, "stream": stream}
    async with httpx.AsyncClient() as client:
        if after_bytes:
            async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                await anext(response.aiter_bytes())
            return
        task = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_client_that_hangs_up_frees_the_worker(start: Start) -> None:
    cluster = await start(outputs(delay=0.005))
    async with served(cluster.app) as url:
        await hang_up(url, after_bytes=True, stream=True)
        await until(lambda: len(cluster.workers[0].cancelled) == 1, 1.0)
        cluster.workers[0].script = silent
        await hang_up(url, after_bytes=False, stream=True)
        await until(lambda: len(cluster.workers[0].cancelled) == 2, 1.0)
        await hang_up(url, after_bytes=False, stream=False)
        await until(lambda: len(cluster.workers[0].cancelled) == 3, 1.0)
        assert load_of(cluster) == 0
    page = (await cluster.client.get("/metrics")).text
    assert 'baton_requests_total{model="tiny",role="router",status="cancelled"} 3.0' in page
    assert re.search(r'baton_requests_waiting{model="tiny",[^}]*} 0.0\n', page)


@pytest.mark.parametrize("n", [1, 3])
async def test_a_slow_client_loses_only_its_own_request(start: Start, n: int) -> None:
    """Straight to the application, with a send that blocks after the first chunk."""
    cluster = await start(outputs(delay=0.001), client_buffer_tokens=50)
    reads = asyncio.Event()
    sent: list[bytes] = []
    body = {"model": MODEL, "prompt": [5, 6], "max_tokens": 400, "stream": True, "n": n}
    asked = False

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if asked:
            await asyncio.Event().wait()
        asked = True
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])
            await reads.wait()

    scope = {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST"},
        **{"path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b""},
        **{"root_path": "", "scheme": "http", "server": ("router", 80)},
        "headers": [(b"content-type", b"application/json")],
    }
    slow = asyncio.create_task(cluster.app(scope, receive, send))
    await until(lambda: bool(sent))
    other = await cluster.post(prompt=[7], max_tokens=300)
    assert other.json()["usage"]["completion_tokens"] == 300
    await until(lambda: len(cluster.workers[0].cancelled) == n)
    reads.set()
    await slow
    assert b"client_too_slow" in sent[-1]
    assert not any(b"[DONE]" in part for part in sent)


async def test_the_openai_client(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(outputs(delay=0.001))
    async with served(cluster.app) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = await client.completions.create(
            model=MODEL,
            prompt="The quick 🦊",
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, usage = "", None
        async for chunk in stream:
            text += "".join(choice.text for choice in chunk.choices)
            usage = chunk.usage or usage
        assert text == tokenizer.decode(expected(tokenizer.encode("The quick 🦊").ids, 40))
        assert usage is not None
        assert usage.completion_tokens == 40
        assert [m.id async for m in client.models.list()] == [MODEL]
        try:
            await client.completions.create(model="nope", prompt="x")
        except openai.NotFoundError as error:
            assert error.code == "model_not_found"
        else:
            raise AssertionError("a model that does not exist was served")
        await client.close()
