"""``/v1/messages`` over fake workers, as Anthropic's client sees it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from fastapi import Request
from tokenizers import Tokenizer

from router.http.intake import _session_name
from tests.router.anthropic.agent_templates import QWEN3
from tests.router.anthropic.sessions import events_of, message_of
from tests.router.conftest import MODEL, Cluster, Start, served
from tests.router.fake_worker import outputs, speaks

EOS = 0
SAY_HI: Any = [{"role": "user", "content": "hi"}]
ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": SAY_HI}
WEATHER: Any = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln 🦊"}}\n</tool_call>'


@asynccontextmanager
async def client_of(cluster: Cluster) -> AsyncIterator[AsyncAnthropic]:
    async with (
        served(cluster.app) as url,
        AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        yield client


async def post(cluster: Cluster, path: str = "/v1/messages", **body: Any) -> Any:
    return await cluster.client.post(path, json={**ASK, **body})


def prompt_of(cluster: Cluster, tokenizer: Tokenizer) -> str:
    request = cluster.workers[-1].requests[-1].request
    text: str = tokenizer.decode(list(request.prompt), skip_special_tokens=False)
    return text


@pytest.fixture(scope="session")
def thinking_path(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reasons."""
    folder = tmp_path_factory.mktemp("thinking")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": QWEN3, "eos_token": "<|eos|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


async def test_a_message(start: Start, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello 🦊").ids
    cluster = await start(speaks([*ids, EOS]))
    async with client_of(cluster) as client:
        message: Any = await client.messages.create(**ASK, system="Be kind")
    assert message.id.startswith("msg")
    assert (message.role, message.model, message.stop_reason) == ("assistant", MODEL, "end_turn")
    assert [(block.type, block.text) for block in message.content] == [("text", "hello 🦊")]
    assert message.usage.output_tokens == len(ids) + 1
    prompt = "system: Be kind<|eos|>\nuser: hi<|eos|>\nassistant:"
    assert prompt_of(cluster, tokenizer) == prompt
    assert message.usage.input_tokens == len(cluster.workers[0].requests[0].request.prompt)


async def test_usage_counts_cached_tokens_apart(start: Start) -> None:
    cluster = await start(outputs(cached=5))
    for stream in (False, True):
        response = await post(cluster, max_tokens=3, stream=stream)
        message = message_of(response.content) if stream else response.json()
        usage, prompt = message["usage"], cluster.workers[0].requests[-1].request.prompt
        assert usage["cache_read_input_tokens"] == 5
        assert usage["input_tokens"] == len(prompt) - 5
        assert usage["cache_creation_input_tokens"] == 0
        assert message["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("together", [1, 3, 1000])
async def test_a_stream_is_the_whole_message(
    start: Start, tokenizer: Tokenizer, together: int
) -> None:
    ids = tokenizer.encode(f"Let me see.{CALL}").ids
    cluster = await start(speaks([*ids, EOS], together=together))
    async with client_of(cluster) as client:
        whole: Any = await client.messages.create(**ASK, tools=[WEATHER])
        async with client.messages.stream(**ASK, tools=[WEATHER]) as stream:
            kinds = [event.type async for event in stream]
            streamed: Any = await stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    for message in (whole, streamed):
        text, call = message.content
        assert (text.type, text.text) == ("text", "Let me see.")
        assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Köln 🦊"})
        assert call.id.startswith("call_")
        assert message.stop_reason == "tool_use"
    assert whole.usage.output_tokens == streamed.usage.output_tokens == len(ids) + 1


async def test_reasoning_is_a_block_of_its_own(
    start: Start, tokenizer: Tokenizer, thinking_path: Path
) -> None:
    ids = tokenizer.encode(f"<think>\nHm. 🦊\n</think>\n\nSo.\n{CALL}").ids
    cluster = await start(speaks([*ids, EOS]), model_path=str(thinking_path))
    given: Any = {**ASK, "tools": [WEATHER], "thinking": {"type": "adaptive"}}
    async with client_of(cluster) as client:
        whole: Any = await client.messages.create(**given)
        async with client.messages.stream(**given) as stream:
            signatures = [e.signature async for e in stream if e.type == "signature"]
            streamed: Any = await stream.get_final_message()
        for message in (whole, streamed):
            thought, text, call = message.content
            assert (thought.type, thought.thinking) == ("thinking", "Hm. 🦊")
            assert thought.signature and signatures == [thought.signature]
            assert (text.text.strip(), call.name) == ("So.", "weather")
            assert message.usage.output_tokens_details.thinking_tokens > 1
        history = [
            *SAY_HI,
            {"role": "assistant", "content": [block.model_dump() for block in streamed.content]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "12 °C"}],
            },
        ]
        await client.messages.create(**{**given, "messages": history})
    before = list(cluster.workers[0].requests[0].request.prompt)
    after = list(cluster.workers[0].requests[-1].request.prompt)
    assert after[: len(before) + len(ids)] == before + ids


async def test_thinking_off_and_its_budget(
    start: Start, tokenizer: Tokenizer, thinking_path: Path
) -> None:
    cluster = await start(speaks([70, EOS]), model_path=str(thinking_path))
    await post(cluster, thinking={"type": "disabled"})
    assert prompt_of(cluster, tokenizer).endswith("<think>\n\n</think>\n\n")
    await post(cluster, output_config={"effort": "high"})
    assert not cluster.workers[0].requests[-1].request.sampling.grammar
    response = await post(cluster, thinking={"type": "enabled", "budget_tokens": 64})
    assert response.status_code == 400, "the end of this model's reasoning is not one token"
    assert "thinking.budget_tokens is not supported" in response.json()["error"]["message"]


async def test_stop_sequences_are_named(start: Start, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three").ids
    cluster = await start(speaks(ids, stop=False))
    for stream in (False, True):
        response = await post(cluster, stop_sequences=["xyz", " tw"], stream=stream)
        message = message_of(response.content) if stream else response.json()
        assert message["content"] == [{"type": "text", "text": "one"}]
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", " tw")


async def test_the_output_is_bounded_by_the_context(start: Start) -> None:
    cluster = await start(speaks([70, EOS]))
    response = await post(cluster, max_tokens=128_000)
    assert response.status_code == 200, response.text
    request = cluster.workers[0].requests[0].request
    assert len(request.prompt) + request.sampling.max_tokens == 4096


async def test_a_prompt_that_is_too_long(start: Start) -> None:
    cluster = await start(speaks([70, EOS]))
    async with client_of(cluster) as client:
        with pytest.raises(anthropic.BadRequestError) as raised:
            await client.messages.create(
                **{**ASK, "messages": [{"role": "user", "content": "zq" * 4096}]}
            )
        counted = await client.messages.count_tokens(
            model=MODEL, messages=[{"role": "user", "content": "zq" * 4096}]
        )
    body: Any = raised.value.body
    assert body["type"] == "error"
    assert body["error"] == {
        "type": "invalid_request_error",
        "message": f"prompt is too long: {counted.input_tokens} tokens > 4096 maximum",
    }
    assert body["request_id"] == raised.value.request_id


async def test_tokens_are_counted_as_the_message_has_them(start: Start) -> None:
    cluster = await start(speaks([70, EOS]))
    prompt: Any = {"model": MODEL, "messages": SAY_HI, "system": "Be kind", "tools": [WEATHER]}
    async with client_of(cluster) as client:
        count = await client.messages.count_tokens(**prompt)
        message: Any = await client.messages.create(**prompt, max_tokens=5)
    assert count.input_tokens == message.usage.input_tokens
    response = await post(cluster, "/v1/messages/count_tokens", max_tokens=None, model="other")
    assert response.status_code == 404


async def test_a_tool_is_forced(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(speaks([*tokenizer.encode(CALL).ids, EOS]))
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        response = await post(cluster, tools=[WEATHER], tool_choice=choice)
        message = response.json()
        assert [block["type"] for block in message["content"]] == ["tool_use"]
        assert message["stop_reason"] == "tool_use"
    response = await post(cluster, tools=[WEATHER], tool_choice={"type": "tool", "name": "x"})
    assert (response.status_code, response.json()["error"]["type"]) == (
        400,
        "invalid_request_error",
    )


async def test_a_long_name_of_a_tool_comes_back(start: Start, tokenizer: Tokenizer) -> None:
    name = "mcp__" + "server__" * 12 + "weather"
    cluster = await start(speaks([70, EOS]))
    await post(cluster, tools=[{**WEATHER, "name": name}])
    shown = prompt_of(cluster, tokenizer).split()[1]
    assert len(shown) == 64 and name.startswith(shown[:50])
    cluster.workers[0].script = speaks([*tokenizer.encode(CALL.replace("weather", shown)).ids, EOS])
    message = (await post(cluster, tools=[{**WEATHER, "name": name}])).json()
    assert message["content"][0]["name"] == name


async def test_a_call_that_was_cut_off_has_what_is_complete(
    start: Start, tokenizer: Tokenizer
) -> None:
    cut = CALL[: CALL.index("🦊")]
    cluster = await start(speaks(tokenizer.encode(cut).ids, stop=False))
    message = (await post(cluster, tools=[WEATHER])).json()
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][0]["input"] == {"city": "Köln "}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_cut_is_no_use_of_a_tool(
    start: Start, tokenizer: Tokenizer, stream: bool
) -> None:
    ids = tokenizer.encode(CALL[: CALL.index("🦊")]).ids
    cluster = await start(speaks([*ids, EOS]))
    response = await post(cluster, tools=[WEATHER], stream=stream)
    end = events_of(response.content)[-2]["delta"] if stream else response.json()
    assert "tool_use" in response.text and end["stop_reason"] == "end_turn"


async def test_json_of_a_schema(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(speaks([70, EOS]))
    form = {"type": "json_schema", "schema": WEATHER["input_schema"]}
    for body in ({"output_config": {"format": form}}, {"output_format": form}):
        assert (await post(cluster, **body)).status_code == 200
        assert cluster.workers[0].requests[-1].request.sampling.grammar


async def test_an_error_in_a_stream(start: Start) -> None:
    cluster = await start(outputs(error_after=3, retryable=False, delay=0.01))
    response = await post(cluster, stream=True)
    assert response.status_code == 200
    *events, error = events_of(response.content)
    assert events[0]["type"] == "message_start"
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")
    assert error["request_id"] == response.headers["x-request-id"]
    async with client_of(cluster) as client:
        with pytest.raises(anthropic.APIStatusError, match="boom"):
            async with client.messages.stream(**ASK) as stream:
                await stream.until_done()


async def test_errors_have_their_types(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("sk-one: acme")
    keys.chmod(0o600)
    cluster = await start(outputs(), api_keys=str(keys), max_body_bytes=5000)

    async def error(method: str, path: str, key: str = "sk-one", **sent: Any) -> tuple[int, str]:
        headers = {"x-api-key": key, **sent.pop("headers", {})}
        response = await cluster.client.request(method, path, headers=headers, **sent)
        body = response.json()
        assert set(body) == {"type", "error", "request_id"}
        assert body["request_id"] == response.headers["x-request-id"]
        return response.status_code, body["error"]["type"]

    path = "/v1/messages"
    for counted in ("", "/count_tokens"):
        where = path + counted
        assert await error("POST", where, "no", json=ASK) == (401, "authentication_error")
        other = {**ASK, "model": "other"}
        assert await error("POST", where, json=other) == (404, "not_found_error")
        assert await error("POST", where, content=b"{") == (415, "invalid_request_error")
        large = {**ASK, "system": "x" * 5000}
        assert await error("POST", where, json=large) == (413, "request_too_large")
        assert await error("GET", where) == (405, "invalid_request_error")
    assert await error("GET", f"{path}/batches") == (404, "not_found_error")
    assert await error("POST", f"{path}?{'x' * 9000}", json=ASK) == (414, "invalid_request_error")
    version = {"anthropic-version": "2023-06-01"}
    for models in ("/v1/models", f"/v1/models/{MODEL}"):
        refused = await error("GET", models, "no", headers=version)
        assert refused == (401, "authentication_error")
    assert await error("GET", "/v1/models/x", headers=version) == (404, "not_found_error")
    assert await error("POST", "/v1/models", headers=version) == (405, "invalid_request_error")
    late = {"x-baton-ttft-deadline-ms": "0.001"}
    assert await error("POST", path, json=ASK, headers=late) == (529, "overloaded_error")


async def test_keys_are_taken_as_x_api_key_everywhere(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"sk-one": {"tenant": "acme", "scopes": ["generate", "monitor"]}}))
    keys.chmod(0o600)
    cluster = await start(outputs(), api_keys=str(keys))
    chat = {"model": MODEL, "messages": SAY_HI, "max_tokens": 2}
    for headers, status in (
        ({"x-api-key": "sk-one"}, 200),
        ({"x-api-key": "sk-one", "authorization": "Basic eDp5"}, 200),
        ({"x-api-key": "no", "authorization": "Bearer sk-one"}, 200),
        ({"x-api-key": "no"}, 401),
        ({}, 401),
    ):
        for path in ("/v1/models", "/metrics", "/ui/overview"):
            response = await cluster.client.get(path, headers=headers)
            assert response.status_code == status, (path, headers)
        response = await cluster.client.post("/v1/chat/completions", json=chat, headers=headers)
        assert response.status_code == status


async def test_models_in_the_shape_of_the_client(start: Start) -> None:
    cluster = await start(outputs())
    async with client_of(cluster) as client:
        page = await client.models.list(limit=1000)
        one = await client.models.retrieve(MODEL)
    assert [model.id for model in page.data] == [one.id] == [MODEL]
    assert (one.type, one.display_name, page.has_more) == ("model", MODEL, False)
    assert (await cluster.client.get("/v1/models")).json()["object"] == "list"


@pytest.mark.parametrize("blocks", [False, True])
async def test_the_answer_continues_a_last_text_of_the_assistant(
    start: Start, tokenizer: Tokenizer, blocks: bool
) -> None:
    cluster = await start(speaks([70, EOS]))
    text: Any = [{"type": "text", "text": "Well <|eos|>,"}] if blocks else "Well <|eos|>,"
    begun = [*SAY_HI, {"role": "assistant", "content": text}]
    message = (await post(cluster, messages=begun)).json()
    assert prompt_of(cluster, tokenizer) == "user: hi<|eos|>\nassistant: Well <|eos|>,"
    counted = await post(cluster, "/v1/messages/count_tokens", messages=begun)
    assert counted.json()["input_tokens"] == message["usage"]["input_tokens"]
    await post(cluster, messages=begun, add_generation_prompt=True)
    assert prompt_of(cluster, tokenizer).endswith(",<|eos|>\nassistant:")


async def test_an_answer_of_a_model_that_thinks_is_continued(
    start: Start, tokenizer: Tokenizer, thinking_path: Path
) -> None:
    ids = tokenizer.encode(" 42, I think.").ids
    cluster = await start(speaks([*ids, EOS]), model_path=str(thinking_path))
    begun = [*SAY_HI, {"role": "assistant", "content": "It is"}]
    message = (await post(cluster, messages=begun)).json()
    assert prompt_of(cluster, tokenizer).endswith("It is")
    assert message["content"] == [{"type": "text", "text": " 42, I think."}]


async def test_other_last_messages_of_the_assistant(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(speaks([70, EOS]))
    for text in ("Well, ", "Well,\n"):
        response = await post(cluster, messages=[*SAY_HI, {"role": "assistant", "content": text}])
        assert response.status_code == 400
        assert "must not end with a space" in response.json()["error"]["message"]
    call = {"type": "tool_use", "id": "c", "name": "weather", "input": {}}
    for content in ([], [{"type": "text", "text": "So. "}, call]):
        said = {"role": "assistant", "content": content}
        assert (await post(cluster, messages=[*SAY_HI, said])).status_code == 200
        assert prompt_of(cluster, tokenizer).endswith("assistant:")


async def test_hello(start: Start) -> None:
    cluster = await start(outputs())
    assert (await cluster.client.head("/api/hello")).status_code == 200


def test_sessions_of_claude_code_have_names() -> None:
    def name(**headers: str) -> str | None:
        raw = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
        return _session_name(Request({"type": "http", "headers": raw}))

    own = name(x_session_id="s", x_claude_code_session_id="t")
    main = name(x_claude_code_session_id="t")
    agent = name(x_claude_code_session_id="t", x_claude_code_agent_id="a")
    assert own == "s"
    assert len({own, main, agent, None}) == 4
    assert name() is None
