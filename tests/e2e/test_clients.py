"""OpenAI's client, unmodified, against real workers: completions, chats, formats, streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from bench.lib.standalone import Standalone
from tests.e2e.conftest import CLIENT_KEY

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

MODEL = "baton-demo"
CODE = "def fibonacci(n):"
ASK: Any = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": [{"type": "text", "text": "sort a list"}]},
]
GREEDY: Any = {"model": MODEL, "temperature": 0, "seed": 7}
ANSWER: Any = {**GREEDY, "messages": ASK, "max_completion_tokens": 24}


class Step(BaseModel):
    what: str = Field(max_length=20)
    effort: Literal["small", "large"]


class Work(BaseModel):
    """``steps`` needs $ref, ``owner`` anyOf."""

    steps: list[Step] = Field(min_length=1, max_length=2)
    minutes: int = Field(ge=1, le=600)
    owner: str | None = Field(max_length=10)


PARSED: Any = {**GREEDY, "messages": ASK, "max_completion_tokens": 400, "response_format": Work}


@pytest.fixture
def client(small_pool: Standalone) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{small_pool.url}/v1", api_key=CLIENT_KEY, max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(small_pool: Standalone) -> AsyncIterator[AsyncOpenAI]:
    url = f"{small_pool.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key=CLIENT_KEY, max_retries=0) as client:
        yield client


def test_completions_whole_and_streamed(client: OpenAI) -> None:
    given: Any = {**GREEDY, "prompt": CODE, "max_tokens": 24}
    whole = client.completions.create(**given)
    stream = client.completions.create(**given, stream=True, stream_options={"include_usage": True})
    *parts, last = stream
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text != ""
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage and last.usage and not last.choices
    assert last.usage.completion_tokens == whole.usage.completion_tokens <= 24
    assert all(part.usage is None for part in parts)
    details = last.usage.prompt_tokens_details
    assert details is not None and details.cached_tokens is not None


def test_chats_whole_and_streamed(client: OpenAI) -> None:
    whole = client.chat.completions.create(**ANSWER)
    parts = list(client.chat.completions.create(**ANSWER, stream=True))
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content != ""
    assert parts[0].choices[0].delta.role == whole.choices[0].message.role == "assistant"


async def test_async_streams_side_by_side(async_client: AsyncOpenAI) -> None:
    async def streamed(seed: int) -> str:
        given = {**ANSWER, "temperature": 1, "seed": seed}
        parts = await async_client.chat.completions.create(**given, stream=True)
        return "".join([part.choices[0].delta.content or "" async for part in parts])

    together = await asyncio.gather(*(streamed(seed) for seed in range(6)))
    assert [await streamed(seed) for seed in range(6)] == together
    assert len(set(together)) > 1


def test_three_choices(client: OpenAI) -> None:
    given = {**ANSWER, "n": 3, "temperature": 1}
    whole = client.chat.completions.create(**given)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2] and len(set(texts)) == 3
    streamed = ["", "", ""]
    for part in client.chat.completions.create(**given, stream=True):
        for choice in part.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_log_probabilities(client: OpenAI) -> None:
    chat = client.chat.completions.create(**ANSWER, logprobs=True, top_logprobs=3)
    told = chat.choices[0].logprobs
    assert told is not None and told.content
    assert all(token.top_logprobs[0].token == token.token for token in told.content)  # greedy
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in told.content)
    said = b"".join(bytes(token.bytes or []) for token in told.content)
    assert said.decode(errors="replace") == chat.choices[0].message.content
    text = client.completions.create(
        **GREEDY, prompt=CODE, max_tokens=8, logprobs=2, echo=True
    ).choices[0]
    assert text.logprobs is not None and text.logprobs.tokens and text.logprobs.token_logprobs
    assert "".join(text.logprobs.tokens) == text.text and text.text.startswith(CODE)
    assert [value for value in text.logprobs.token_logprobs if value is None] == [None]


def test_a_stop_string_ends_the_text_before_it(client: OpenAI) -> None:
    free = client.completions.create(**GREEDY, prompt=CODE, max_tokens=24).choices[0].text
    stop = free[len(free) // 2 :][:3]
    cut = client.completions.create(**GREEDY, prompt=CODE, max_tokens=24, stop=[stop]).choices[0]
    assert cut.text == free[: free.index(stop)] and cut.finish_reason == "stop"


def test_parse_gives_the_model_that_was_asked_for(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(**PARSED).choices[0].message.parsed
    assert isinstance(parsed, Work) and 1 <= len(parsed.steps) <= 2


async def test_async_parse(async_client: AsyncOpenAI) -> None:
    parsed = (await async_client.chat.completions.parse(**PARSED)).choices[0].message.parsed
    assert isinstance(parsed, Work)


def test_the_stream_helper(client: OpenAI) -> None:
    with client.chat.completions.stream(
        **PARSED, logprobs=True, stream_options={"include_usage": True}
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = "".join(event.delta for event in events if event.type == "content.delta")
    assert deltas == final.choices[0].message.content
    done = [event.parsed for event in events if event.type == "content.done"]
    assert done == [final.choices[0].message.parsed] and isinstance(done[0], Work)
    assert final.usage is not None and final.usage.completion_tokens > 0
    seen = [t for e in events if e.type == "logprobs.content.delta" for t in e.content]
    assert "".join(token.token for token in seen[:-1]) == deltas  # the last one ended the text


def test_json_object(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        **{**ANSWER, "max_completion_tokens": 500}, response_format={"type": "json_object"}
    )
    content = chat.choices[0].message.content
    assert content is not None and content.startswith("{")
    assert chat.choices[0].finish_reason == "length" or content.endswith("}")


def test_raw_responses(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**ANSWER)
    assert raw.status_code == 200 and raw.headers["x-request-id"]
    assert raw.parse().choices[0].message.content
    with client.completions.with_streaming_response.create(
        **GREEDY, prompt=CODE, max_tokens=4, stream=True
    ) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert [line for line in streamed.iter_lines() if line][-1] == "data: [DONE]"


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"
