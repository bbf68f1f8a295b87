"""Chats over fake workers, as the wire and as OpenAI's client see them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from protocol.wire import wire_pb2 as pb
from tests.router.conftest import MODEL, Cluster, Start, served, until
from tests.router.fake_worker import expected, logprob_of, outputs, speaks

EOS = 0
SAY_HI: Any = [{"role": "user", "content": "hi"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln 🦊"}}\n</tool_call>'


@asynccontextmanager
async def client_of(cluster: Cluster) -> AsyncIterator[AsyncOpenAI]:
    async with (
        served(cluster.app) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def prompt_of(cluster: Cluster, tokenizer: Tokenizer) -> str:
    request = cluster.workers[-1].requests[-1].request
    text: str = tokenizer.decode(list(request.prompt), skip_special_tokens=False)
    return text


async def test_a_chat(start: Start, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello 🦊").ids
    cluster = await start(speaks([*ids, EOS]))
    response = await cluster.chat("wie geht's?")
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello 🦊", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert prompt_of(cluster, tokenizer) == "user: wie geht's?<|eos|>\nassistant:"
    assert body["usage"]["completion_tokens"] == len(ids) + 1
    assert body["system_fingerprint"].startswith("fp_")


async def test_without_a_bound_the_answer_may_fill_the_context(start: Start) -> None:
    cluster = await start(outputs())
    cluster.workers[0].script = speaks([70, EOS])
    await cluster.chat()
    request = cluster.workers[0].requests[0].request
    assert len(request.prompt) + request.sampling.max_tokens == 4096
    for name in ("max_completion_tokens", "max_tokens"):
        await cluster.chat(**{name: 7})
        assert cluster.workers[0].requests[-1].request.sampling.max_tokens == 7


async def test_without_a_bound_the_answer_fits_the_workers(start: Start) -> None:
    cluster = await start(speaks([70, EOS]))
    cluster.workers[0].load = pb.Load(kv_tokens_free=500, kv_tokens_total=640)
    [link] = cluster.app.state.router.pool.links.values()
    await until(lambda: link.load().kv_total == 640)
    assert (await cluster.chat()).status_code == 200
    request = cluster.workers[0].requests[0].request
    assert len(request.prompt) + request.sampling.max_tokens == 640


async def test_what_the_template_gets(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(speaks([70, EOS]))
    messages: Any = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "<|eos|>"}]},
    ]
    await cluster.chat(messages=messages, chat_template_kwargs={"voice": "bot"})
    request = cluster.workers[0].requests[-1].request
    assert prompt_of(cluster, tokenizer) == "system: be kind<|eos|>\nuser: <|eos|><|eos|>\nbot:"
    assert list(request.prompt).count(EOS) == 2, "what a client types is no control token"
    await cluster.chat(messages=messages[:1], add_generation_prompt=False)
    assert prompt_of(cluster, tokenizer) == "system: be kind<|eos|>\n"


async def test_a_stream(start: Start, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one 🦊 two").ids
    cluster = await start(speaks([*ids, EOS]))
    async with client_of(cluster) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=SAY_HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    first, *middle, last, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert not any(chunk.choices[0].delta.role for chunk in middle)
    text = "".join(c.choices[0].delta.content or "" for c in [first, *middle, last])
    assert text == "one 🦊 two"
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].delta.content is None
    assert usage.choices == [] and usage.usage is not None
    assert usage.usage.completion_tokens == len(ids) + 1
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert len({c.id for c in chunks}) == 1


async def test_choices(start: Start) -> None:
    cluster = await start(outputs(together=2, delay=0.001))
    given: Any = {"model": MODEL, "messages": SAY_HI, "n": 3, "max_completion_tokens": 5, "seed": 1}
    async with client_of(cluster) as client:
        whole = await client.chat.completions.create(**given)
        texts = {choice.index: choice.message.content for choice in whole.choices}
        streamed: dict[int, str] = {}
        async for chunk in await client.chat.completions.create(**given, stream=True):
            for choice in chunk.choices:
                before = streamed.get(choice.index, "")
                assert bool(choice.delta.role) == (choice.index not in streamed)
                streamed[choice.index] = before + (choice.delta.content or "")
    assert streamed == texts
    assert len(set(texts.values())) == 3


async def test_log_probabilities(start: Start, tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_to_id(c) for c in "aðŁ¦Ĭb"]
    cluster = await start(speaks(ids, stop=False))
    given: Any = {"model": MODEL, "messages": SAY_HI, "logprobs": True, "top_logprobs": 2}
    async with client_of(cluster) as client:
        whole = await client.chat.completions.create(**given)
        streamed: list[Any] = []
        async for chunk in await client.chat.completions.create(**given, stream=True):
            [choice] = chunk.choices
            told = choice.logprobs.content if choice.logprobs else None
            if told:
                data = b"".join(bytes(token.bytes or []) for token in told)
                assert data.decode() == choice.delta.content
            streamed += told or []
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.content == streamed
    assert [token.logprob for token in streamed] == [logprob_of(i) for i in ids]
    assert all(len(token.top_logprobs) == 2 for token in streamed)
    assert b"".join(bytes(token.bytes) for token in streamed).decode() == "a🦊b"


@pytest.mark.parametrize("together", [1, 3, 1000])
async def test_tool_calls(start: Start, tokenizer: Tokenizer, together: int) -> None:
    ids = tokenizer.encode(f"Let me see.{CALL}").ids
    cluster = await start(speaks([*ids, EOS], together=together))
    given: Any = {"model": MODEL, "messages": SAY_HI, "tools": [WEATHER]}
    async with client_of(cluster) as client:
        whole = (await client.chat.completions.create(**given)).choices[0]
        async with client.chat.completions.stream(**given) as stream:
            async for _ in stream:
                pass
            streamed = (await stream.get_final_completion()).choices[0]
    assert "weather" in prompt_of(cluster, tokenizer)
    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        assert choice.message.tool_calls is not None
        [call] = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "weather")
        assert json.loads(call.function.arguments) == {"city": "Köln 🦊"}
        assert call.id.startswith("call_")
    assert cluster.workers[0].requests[0].request.sampling.grammar


async def test_a_call_alone_has_no_content(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(speaks([*tokenizer.encode(CALL).ids, EOS]))
    named = {"type": "function", "function": {"name": "weather"}}
    body = (await cluster.chat(tools=[WEATHER], tool_choice="required")).json()
    assert body["choices"][0]["message"]["content"] is None
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert set(body["choices"][0]["message"]["tool_calls"][0]) == {"id", "type", "function"}
    body = (await cluster.chat(tools=[WEATHER], tool_choice=named)).json()
    assert body["choices"][0]["finish_reason"] == "stop", "as OpenAI, where it was named"


async def test_a_cut_call_is_length(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(speaks(tokenizer.encode(CALL[:60]).ids, stop=False))
    choice = (await cluster.chat(tools=[WEATHER])).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city"')


async def test_a_tool_result_goes_into_the_prompt(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(speaks([*tokenizer.encode(CALL).ids, EOS]))
    async with client_of(cluster) as client:
        given: Any = {"model": MODEL, "tools": [WEATHER]}
        first = await client.chat.completions.create(messages=SAY_HI, **given)
        message = first.choices[0].message
        assert message.tool_calls
        answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
        await client.chat.completions.create(messages=[*SAY_HI, message, answer], **given)
    assert '{"city": "Köln 🦊"}' in prompt_of(cluster, tokenizer)
    assert "tool: sunny" in prompt_of(cluster, tokenizer)


async def test_structured_parse(start: Start, tokenizer: Tokenizer) -> None:
    class Point(pydantic.BaseModel):
        x: int
        y: int

    cluster = await start(speaks([*tokenizer.encode('{"x":1,"y":2}').ids, EOS]))
    async with client_of(cluster) as client:
        parsed = await client.chat.completions.parse(
            model=MODEL, messages=SAY_HI, response_format=Point
        )
    assert parsed.choices[0].message.parsed == Point(x=1, y=2)
    grammar = cluster.workers[0].requests[0].request.sampling.grammar
    assert "json_schema" in grammar and '"x"' in grammar


async def test_a_grammar_for_a_completion(start: Start) -> None:
    cluster = await start(outputs())
    for given in ({"guided_regex": "a+"}, {"structured_outputs": {"regex": "a+"}}):
        assert (await cluster.post(prompt=[5], max_tokens=1, **given)).status_code == 200
        assert "a+" in cluster.workers[0].requests[-1].request.sampling.grammar


async def test_formats_by_the_names_of_llama_cpp(start: Start) -> None:
    cluster = await start(outputs())
    for given, part in (
        ({"grammar": 'root ::= "a"{5,5}'}, "a"),
        ({"json_schema": {"const": "xyz"}}, "xyz"),
    ):
        answer = await cluster.chat(max_tokens=1, **given)
        assert answer.status_code == 200 and "x-baton-ignored" not in answer.headers
        assert part in cluster.workers[0].requests[-1].request.sampling.grammar
    refused = await cluster.chat(grammar="root ::= (")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "grammar")


async def test_a_model_without_a_template(
    start: Start, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    cluster = await start(outputs(), model_path=str(tmp_path))
    response = await cluster.chat()
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "chat_template_missing")
    assert "no chat template" in error["message"]
    assert (await cluster.post(prompt="x")).status_code == 200


@pytest.mark.parametrize(
    ("given", "param", "says"),
    [
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": None}, "messages", "required"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [*SAY_HI, {"role": "boss"}]}, "messages[1]", "role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "image_url",
        ),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "older name"),
        ({"max_completion_tokens": 5000}, "max_completion_tokens", "4096"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
        ({"logprobs": 1}, "logprobs", "true or false"),
        ({"chat_template": "{{ 7 }}"}, "chat_template", "operator"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "messages"),
        ({"tool_choice": "required"}, "tool_choice", "with tools"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice", "must be"),
        ({"tools": [{"type": "search"}]}, "tools[0].type", "function"),
        ({"functions": [{}]}, "functions", "use tools"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
            "response_format.json_schema.name",
            "letters",
        ),
        ({"guided_regex": "("}, "guided_regex", "("),
        ({"guided_regex": "a", "guided_json": {}}, "guided_json", "without guided_regex"),
        ({"prompt": "x"}, "prompt", "prompts go to /v1/completions"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"metadata": {"a": 1}}, "metadata.a", "string"),
    ],
)
async def test_refusals(start: Start, given: dict[str, Any], param: str, says: str) -> None:
    cluster = await start(outputs())
    response = await cluster.chat(**given)
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert says in error["message"]
    assert not cluster.workers[0].requests


async def test_neutral_values_are_taken(start: Start) -> None:
    cluster = await start(speaks([70, EOS]))
    response = await cluster.chat(
        **{"store": True, "service_tier": "flex", "user": "u", "metadata": {"a": "b"}},
        **{"tools": [], "functions": [], "stop": ["1", "2", "3", "4", "5"], "echo": False},
        **{"spaces_between_special_tokens": False, "prompt_cache_retention": "24h"},
        **{"repetition_penalty": 1, "length_penalty": 1.0, "truncate_prompt_tokens": None},
        **{"modalities": ["text"], "response_format": {"type": "text"}, "n": 1},
        **{"prompt_cache_key": "k", "safety_identifier": "s", "function_call": "none"},
        **{"reasoning_effort": "none", "verbosity": "medium", "tool_choice": "none"},
    )
    assert response.status_code == 200, response.text


async def test_the_clients_errors(start: Start) -> None:
    cluster = await start(outputs())
    async with client_of(cluster) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=SAY_HI, temperature=3)
    assert caught.value.param == "temperature"


async def test_token_ids(start: Start) -> None:
    cluster = await start(outputs())
    body = (await cluster.chat(max_tokens=4, return_token_ids=True)).json()
    assert body["choices"][0]["token_ids"] == expected(body["prompt_token_ids"], 4)
