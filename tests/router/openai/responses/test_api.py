"""``/v1/responses`` over fake workers: errors, failures, other methods, and models that think."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from protocol.wire import wire_pb2 as pb
from tests.router.conftest import MODEL, Cluster, Start
from tests.router.fake_worker import outputs, speaks
from tests.router.http.api.test_chat import EOS
from tests.router.openai.responses.streams import events_of, items_of


async def ask(cluster: Cluster, items: Any = "hi", headers: Any = None, **body: Any) -> Any:
    body = {"model": MODEL, "input": items, **body}
    return await cluster.client.post("/v1/responses", json=body, headers=headers)


def error_of(reply: Any, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


async def test_mistakes_are_answered_before_the_stream(start: Start) -> None:
    cluster = await start(outputs())
    for stream in (False, True):
        reply = await ask(cluster, [{"type": "item_reference", "id": "x"}], stream=stream)
        assert error_of(reply, 400)["param"] == "input[0]"
        reply = await ask(cluster, previous_response_id="resp_1", stream=stream)
        assert error_of(reply, 400)["code"] == "unsupported_parameter"
        reply = await ask(cluster, model="other", stream=stream)
        assert error_of(reply, 404)["code"] == "model_not_found"


async def test_a_tools_schema_that_cannot_be_compiled_is_named(start: Start) -> None:
    cluster = await start(outputs())
    wrong = {"type": "function", "name": "f", "parameters": {"type": "object", "$ref": "#/x"}}
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [wrong]}]
    error = error_of(await ask(cluster, tools=tools), 400)
    assert error["param"] == "tools[1].tools[0].parameters", error


async def test_no_response_is_stored(start: Start) -> None:
    cluster = await start(outputs())
    for method in ("GET", "DELETE"):
        reply = await cluster.client.request(method, "/v1/responses/resp_1")
        assert error_of(reply, 404)["code"] == "not_found"
    reply = await cluster.client.get("/v1/responses/input_tokens")
    assert (error_of(reply, 405)["code"], reply.headers["allow"]) == ("method_not_allowed", "POST")
    assert reply.json()["error"]["message"].endswith("this path accepts only POST")
    assert error_of(await cluster.client.get("/v1/responses"), 405)["type"]


async def test_tokens_are_counted_also_beyond_the_context(start: Start) -> None:
    cluster = await start(outputs())
    for text in ("hi", "x y " * 5000):
        body = {"model": MODEL, "input": text}
        reply = await cluster.client.post("/v1/responses/input_tokens", json=body)
        assert reply.status_code == 200, reply.text
        counted = reply.json()
        assert counted["object"] == "response.input_tokens"
    assert counted["input_tokens"] > 4096
    short = (await ask(cluster, max_output_tokens=1)).json()
    reply = await cluster.client.post(
        "/v1/responses/input_tokens", json={"model": MODEL, "input": "hi"}
    )
    assert reply.json()["input_tokens"] == short["usage"]["input_tokens"]


async def test_a_bound_that_does_not_fit_is_lowered(start: Start) -> None:
    cluster = await start(speaks([70, EOS]))
    assert (await ask(cluster, max_output_tokens=128_000)).status_code == 200
    request = cluster.workers[0].requests[0].request
    assert len(request.prompt) + request.sampling.max_tokens == 4096


async def test_what_the_response_repeats(start: Start) -> None:
    cluster = await start(speaks([70, EOS]))
    asked: dict[str, Any] = {
        "instructions": "be kind",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 0.25,
        "max_output_tokens": 9,
        "reasoning": {"effort": "low"},
        "tools": [{"type": "web_search"}],
        "text": {"verbosity": "low"},
    }
    shown = (await ask(cluster, **asked)).json()
    for name in ("instructions", "metadata", "temperature", "top_p", "max_output_tokens", "tools"):
        assert shown[name] == asked[name]
    assert shown["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert shown["reasoning"] == {"effort": "low", "summary": None}
    assert (shown["object"], shown["store"], shown["error"]) == ("response", False, None)


async def test_a_failure_after_some_text_is_the_last_event(start: Start) -> None:
    cluster = await start(outputs(error_after=2, retryable=False))
    events = events_of((await ask(cluster, stream=True)).text)
    failed = events[-1]
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"]["code"] == "server_error"
    assert any(event["type"] == "response.output_text.delta" for event in events)


async def test_a_tenants_limit_is_told_inside_the_stream(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"sk-a": {"tenant": "a", "requests_per_minute": 1}}))
    path.chmod(0o600)
    cluster = await start(speaks([70, EOS]), api_keys=str(path))
    headers = {"authorization": "Bearer sk-a"}
    assert (await ask(cluster, headers=headers, stream=True)).status_code == 200
    reply = await ask(cluster, headers=headers, stream=True)
    assert reply.status_code == 200
    error = events_of(reply.text)[-1]["response"]["error"]
    assert error["code"] == "rate_limit_exceeded" and "try again in" in error["message"]
    assert reply.headers["x-ratelimit-remaining-requests"] == "0"
    error_of(await ask(cluster, headers=headers), 429)
    assert (await ask(cluster, headers={"authorization": "Bearer no"})).status_code == 401


async def test_a_silent_stream_is_kept_alive_with_its_state(start: Start) -> None:
    release = asyncio.Event()

    async def script(request: pb.Request) -> AsyncIterator[pb.Output]:
        await release.wait()
        yield pb.Output(id=request.id, tokens=[70, EOS], finish=pb.FINISH_STOP)

    cluster = await start(script, keep_alive_s=0.05)
    task = asyncio.create_task(ask(cluster, stream=True))
    await asyncio.sleep(1.5)
    release.set()
    events = events_of((await task).text)
    assert sum(event["type"] == "response.in_progress" for event in events) > 2


async def test_the_explanation_is_part_of_the_last_response(start: Start) -> None:
    cluster = await start(speaks([70, EOS]))
    headers = {"x-baton-explain": "1"}
    events = events_of((await ask(cluster, headers=headers, stream=True)).text)
    assert "baton" in events[-1]["response"] and "baton" not in events[0]["response"]
    assert "baton" in (await ask(cluster, headers=headers)).json()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_a_stop_string_cuts_is_incomplete(
    start: Start, tokenizer: Tokenizer, stream: bool
) -> None:
    text = '<tool_call>{"name": "run", "arguments": {"a": "one two"}}</tool_call>'
    cluster = await start(speaks([*tokenizer.encode(text).ids, EOS]))
    tools = [{"type": "function", "name": "run", "parameters": {"type": "object"}}]
    for stop, status in (("two", "incomplete"), ("</tool_call>", "completed")):
        reply = await ask(cluster, tools=tools, stop=stop, stream=stream)
        [call] = items_of(events_of(reply.text)) if stream else reply.json()["output"]
        assert (call["type"], call["status"]) == ("function_call", status)


async def test_a_refused_stream_has_the_ids_and_the_model_of_the_request(
    start: Start, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"sk-a": {"tenant": "a", "requests_per_minute": 1}}))
    path.chmod(0o600)
    cluster = await start(speaks([70, EOS]), api_keys=str(path))
    sent = {"input": "x y " * 5000, "stream": True}
    for code in ("context_length_exceeded", "rate_limit_exceeded"):
        headers = {"authorization": "Bearer sk-a"}
        reply = await cluster.client.post("/v1/responses", json=sent, headers=headers)
        response = events_of(reply.text)[-1]["response"]
        assert (response["error"]["code"], response["model"]) == (code, MODEL)
        assert response["id"] == f"resp_{reply.headers['x-request-id']}"
        sent = {"input": "hi", "stream": True}
        await cluster.client.post("/v1/responses", json=sent, headers=headers)


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_an_item_of_its_own(
    start: Start, tokenizer: Tokenizer, stream: bool
) -> None:
    text = "<think>\nhm, so\n</think>\n\nHello."
    cluster = await start(speaks([*tokenizer.encode(text).ids, EOS]), reasoning_parser="qwen3")
    reply = await ask(cluster, stream=stream)
    if stream:
        events = events_of(reply.text)
        items, response = items_of(events), events[-1]["response"]
        assert any(event["type"] == "response.reasoning_text.delta" for event in events)
    else:
        response = reply.json()
        items = response["output"]
    thought, said = items
    assert thought["type"] == "reasoning" and thought["id"].startswith("rs_")
    assert [part["text"].strip() for part in thought["content"]] == ["hm, so"]
    assert said["content"][0]["text"].strip() == "Hello."
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    again = [{"role": "user", "content": "hi"}, *items, {"role": "user", "content": "more"}]
    assert (await ask(cluster, again)).status_code == 200
