"""What OpenAI's client makes of errors, of a server that is not ready, and of giving up."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from bench.lib.standalone import Standalone
from tests.e2e.conftest import CLIENT_KEY
from tests.e2e.test_clients import ANSWER, CODE, GREEDY, MODEL, async_client, client

__all__ = ["async_client", "client"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

LONG: Any = {**GREEDY, "prompt": CODE, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}


@pytest.mark.parametrize(
    ("error", "changed", "param", "code"),
    [
        (openai.NotFoundError, {"model": "gpt-9"}, "model", "model_not_found"),
        (openai.BadRequestError, {"temperature": 3}, "temperature", None),
        (openai.BadRequestError, {"messages": []}, "messages", None),
        (
            openai.BadRequestError,
            {"max_completion_tokens": 9999},
            "max_completion_tokens",
            "context_length_exceeded",
        ),
        (
            openai.RateLimitError,
            {"extra_headers": {"x-baton-ttft-deadline-ms": "0.001"}},
            None,
            "overloaded",
        ),
        (openai.AuthenticationError, {"extra_headers": {"Authorization": "Bearer no"}}, None, None),
    ],
)
def test_errors_are_the_clients_own(
    client: OpenAI,
    error: type[openai.APIStatusError],
    changed: dict[str, Any],
    param: str | None,
    code: str | None,
) -> None:
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{**ANSWER, **changed})
    told = caught.value
    assert told.param == param and told.message and told.request_id
    assert code is None or told.code == code


def test_a_schema_that_no_grammar_can_hold(client: OpenAI) -> None:
    schema = {"name": "x", "schema": {"type": "no such type"}}
    wanted: Any = {"type": "json_schema", "json_schema": schema}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ANSWER, response_format=wanted)
    assert caught.value.param == "response_format.json_schema.schema"


async def test_retries_until_a_worker_is_there(small_pool: Standalone) -> None:
    """Its only decode worker is killed; another one is started as late as it loads."""
    seen: list[int] = []

    async def note(response: httpx2.Response) -> None:
        seen.append(response.status_code)
        assert response.status_code != 503 or float(response.headers["retry-after"]) > 0

    http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [note]})
    url = f"{small_pool.url}/v1"
    small_pool.workers[1].kill()
    small_pool.workers[1].wait()
    await asyncio.sleep(0.3)  # until the router sees the stream broken
    async with AsyncOpenAI(
        base_url=url, api_key=CLIENT_KEY, max_retries=60, http_client=http
    ) as client:
        chat = await client.chat.completions.create(**ANSWER)
    assert chat.choices[0].message.content
    assert seen[0] == 503 and seen[-1] == 200 and set(seen) == {503, 200}
    await small_pool.whole()


async def test_retries_until_a_router_is_there(small_pool: Standalone) -> None:
    """One that is killed and started again: refused connections, then 503, then an answer."""
    small_pool.restart_router()
    async with AsyncOpenAI(
        base_url=f"{small_pool.url}/v1", api_key=CLIENT_KEY, max_retries=60
    ) as client:
        parts = await client.chat.completions.create(**ANSWER, stream=True)
        assert [part async for part in parts]
    await small_pool.whole()


async def test_an_error_within_a_stream(small_pool: Standalone, async_client: AsyncOpenAI) -> None:
    """Nobody goes on with it in time: the client raises, instead of ending short."""
    text = ""
    with pytest.raises(openai.APIError) as caught:
        async for part in await async_client.completions.create(**LONG, stream=True):
            text += part.choices[0].text
            if text and small_pool.routers[0].poll() is None:
                small_pool.routers[0].kill()
    assert text and not isinstance(caught.value, openai.APIStatusError)
    small_pool.restart_router()
    await small_pool.whole()


@pytest.mark.parametrize("how", ["timeout", "cancelled", "closed"])
async def test_who_gives_up_frees_the_worker(
    small_pool: Standalone, async_client: AsyncOpenAI, how: str
) -> None:
    if how == "timeout":
        with pytest.raises(openai.APITimeoutError):
            await async_client.completions.create(**LONG, timeout=0.5)
    elif how == "cancelled":
        task = asyncio.create_task(async_client.completions.create(**LONG))
        await busy(small_pool, True)
        task.cancel()
        await asyncio.wait([task])
    else:
        stream = await async_client.completions.create(**LONG, stream=True)
        async for _ in stream:
            break
        await stream.close()
    began = time.monotonic()
    await busy(small_pool, False)
    # Pages are free within 2 s; the directory learns of it one beat and one renewal later.
    assert time.monotonic() - began < 2.0 + 1.5
    assert [model.id async for model in async_client.models.list()] == [MODEL]


async def busy(pool: Standalone, wanted: bool) -> None:
    """Until pages of a worker are, or are not, in use."""
    async with asyncio.timeout(10):
        while any(r.kv_tokens_free < r.kv_tokens_total for r in await pool.records()) != wanted:
            await asyncio.sleep(0.05)
