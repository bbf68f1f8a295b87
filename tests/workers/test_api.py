"""The API over real engines: choices, scores, chats and formats of the demo model."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from bench.lib.settings import router_settings
from cluster.local.redis_server import EmbeddedRedis
from cluster.models.locate import demo_path
from protocol.requests import Request
from protocol.sampling_params import SamplingParams
from router.http.app import create_app
from tests.router.conftest import served, until
from tests.workers.harness import TOKEN, Client, running, settings

MODEL = "demo"
PROMPT = "def area(width, height):\n    return"
POINT: Any = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["x", "ok"],
    "additionalProperties": False,
}


class Whole:
    def __init__(self, http: httpx.AsyncClient, openai: AsyncOpenAI, engine: Client) -> None:
        self.http = http
        self.openai = openai
        self.engine = engine

    async def complete(self, **body: Any) -> dict[str, Any]:
        given = {"model": MODEL, "prompt": PROMPT, "return_token_ids": True, **body}
        reply = await self.http.post("/v1/completions", json=given, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()  # type: ignore[no-any-return]


@pytest_asyncio.fixture(scope="module")
async def whole(tmp_path_factory: Any) -> AsyncIterator[Whole]:
    """A prefill worker, a decode worker, a router, and ways to each."""
    folder: Path = tmp_path_factory.mktemp("redis")
    redis = EmbeddedRedis(folder)
    redis.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(redis.stop)
        wanted = [settings(r, redis, demo_path(), model_id=MODEL) for r in ("prefill", "decode")]
        _, decode = await stack.enter_async_context(running(*wanted))
        app = create_app(
            router_settings(
                cluster="test",
                redis_url=redis.url,
                token=TOKEN,
                secret=b"s" * 32,
                model_path=str(demo_path()),
                model_id=MODEL,
                refresh_s=0.1,
            )
        )
        await stack.enter_async_context(app.router.lifespan_context(app))
        pool = app.state.router.pool
        await until(lambda: pool.attached + len(pool.prefill) == 2)
        url = await stack.enter_async_context(served(app))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url))
        openai = await stack.enter_async_context(
            AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        )
        engine = Client(decode)
        stack.push_async_callback(engine.close)
        yield Whole(http, openai, engine)


async def test_a_choice_is_the_same_however_it_is_asked_for(whole: Whole) -> None:
    given: dict[str, Any] = {"seed": 11, "max_tokens": 12, "ignore_eos": True}
    three = await whole.complete(n=3, **given)
    got = [choice["token_ids"] for choice in three["choices"]]
    assert len({tuple(ids) for ids in got}) == 3
    prompt = three["choices"][0]["prompt_token_ids"]
    for index, ids in enumerate(got):
        sampling = SamplingParams(seed=11, choice=index, max_tokens=12, ignore_eos=True)
        request = Request(
            id=f"alone-{index}", prompt=tuple(prompt), sampling=sampling, cache_root=bytes(16)
        )
        answer = await whole.engine.submit(request)
        await answer.ended.wait()
        assert answer.tokens == ids
    both = await whole.complete(prompt=["x = [1, 2", PROMPT], n=2, **given)
    assert [choice["token_ids"] for choice in both["choices"][2:]] == got[:2]


async def test_a_prompt_has_the_score_that_it_had_as_output(whole: Whole) -> None:
    drawn = await whole.complete(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True)
    [choice] = drawn["choices"]
    prompt, ids = choice["prompt_token_ids"], choice["token_ids"]
    scored = await whole.complete(prompt=[[*prompt, *ids]], max_tokens=0, echo=True, logprobs=3)
    told = scored["choices"][0]["logprobs"]
    for mine, theirs in zip(
        told["token_logprobs"][-8:], choice["logprobs"]["token_logprobs"], strict=True
    ):
        assert math.isclose(mine, theirs, abs_tol=1e-3)
    assert told["token_logprobs"][0] is None
    assert scored["choices"][0]["text"] == PROMPT + choice["text"]
    assert scored["usage"]["completion_tokens"] == 0


async def test_the_best_are_the_likeliest(whole: Whole) -> None:
    given: dict[str, Any] = {"seed": 3, "max_tokens": 6, "ignore_eos": True, "logprobs": 0}
    every = await whole.complete(n=4, **given)
    sums = [sum(c["logprobs"]["token_logprobs"]) for c in every["choices"]]
    likeliest = every["choices"][sums.index(max(sums))]
    best = await whole.complete(n=1, best_of=4, **given)
    assert best["choices"][0]["token_ids"] == likeliest["token_ids"]
    assert best["usage"]["completion_tokens"] == 24


async def test_a_chat_without_a_bound(whole: Whole) -> None:
    chat = await whole.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "sort a list"}],
        stop=["\n"],
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    [choice] = chat.choices
    assert choice.finish_reason in ("stop", "length")
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert chat.usage is not None
    assert len(choice.logprobs.content) == chat.usage.completion_tokens


async def test_the_whole_vocabulary_and_chosen_tokens_are_reported(whole: Whole) -> None:
    """Their probabilities add up to 1, and those of chosen tokens are among them."""
    given: dict[str, Any] = {"max_tokens": 2, "seed": 1, "return_tokens_as_token_ids": True}
    allowed = {"allowed_token_ids": [300, 301, 302], **given}
    [full] = (await whole.complete(logprobs=-1, **allowed))["choices"]
    [some] = (await whole.complete(logprobs=5, logprob_token_ids=[7, 300], **allowed))["choices"]
    assert set(full["token_ids"]) <= {300, 301, 302} and some["token_ids"] == full["token_ids"]
    pairs = zip(
        full["logprobs"]["top_logprobs"],
        some["logprobs"]["top_logprobs"],
        full["token_ids"],
        strict=True,
    )
    for every, chosen, drawn in pairs:
        assert len(every) == 4096
        assert math.isclose(sum(map(math.exp, every.values())), 1.0, abs_tol=1e-3)
        assert set(chosen) == {f"token_id:{token}" for token in (7, 300, drawn)}
        for name, value in chosen.items():
            assert math.isclose(value, every[name], abs_tol=1e-4)


async def test_a_chat_scores_its_prompt(whole: Whole) -> None:
    chat: Any = await whole.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "sort"}],
        max_completion_tokens=1,
        extra_body={"prompt_logprobs": -1, "return_token_ids": True},
    )
    first, *rest = chat.prompt_logprobs
    assert first is None and len(rest) == len(chat.prompt_token_ids) - 1
    for token, row in zip(chat.prompt_token_ids[1:], rest, strict=True):
        ranks = [entry["rank"] for entry in row.values()]
        assert len(row) == 4096 and sorted(ranks) == list(range(1, 4097))
        assert row[str(token)]["logprob"] <= 0


async def test_a_format_holds_for_every_choice(whole: Whole) -> None:
    chat = await whole.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "a point"}],
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": POINT}},
        n=4,
        max_completion_tokens=64,
    )
    for choice in chat.choices:
        assert choice.finish_reason == "stop"
        value = json.loads(choice.message.content or "")
        assert 0 <= value["x"] <= 99 and value["ok"] in (True, False)


async def test_a_tool_must_be_called(whole: Whole) -> None:
    tool: Any = {"type": "function", "function": {"name": "plot", "parameters": POINT}}
    given: Any = {
        **{"model": MODEL, "messages": [{"role": "user", "content": "plot it"}], "seed": 2},
        **{"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False},
        "max_completion_tokens": 200,
    }
    said = (await whole.openai.chat.completions.create(**given)).choices[0]
    async with whole.openai.chat.completions.stream(**given) as stream:
        streamed = (await stream.get_final_completion()).choices[0]
    for choice in (said, streamed):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        [call] = choice.message.tool_calls
        assert call.type == "function" and call.function.name == "plot"
        assert set(json.loads(call.function.arguments)) == {"x", "ok"}


async def test_an_end_token_is_no_text(whole: Whole) -> None:
    tokenizer = Tokenizer.from_file(str(demo_path() / "tokenizer.json"))
    newline = tokenizer.encode("\n", add_special_tokens=False).ids[-1]
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 64, "stop_token_ids": [newline]}
    [plain] = (await whole.complete(**given))["choices"]
    [kept] = (await whole.complete(include_stop_str_in_output=True, **given))["choices"]
    assert plain["finish_reason"] == kept["finish_reason"] == "stop"
    assert plain["token_ids"] == kept["token_ids"] and plain["token_ids"][-1] == newline
    assert kept["text"] == plain["text"] + "\n"
