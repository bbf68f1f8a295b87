"""Log-probabilities in ``/v1/responses``: each delta has those of its own tokens."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import Response, ResponseTextDeltaEvent, ResponseTextDoneEvent
from tokenizers import Tokenizer

from router.openai.responses import message_logprobs
from router.openai.responses.body import OUTPUT_LOGPROBS
from tests.router.conftest import MODEL, Cluster, Start
from tests.router.fake_worker import logprob_of, speaks
from tests.router.http.api.test_chat import CALL, EOS, client_of
from tests.router.openai.responses.streams import events_of
from tests.router.openai.responses.test_sdk import WEATHER
from tests.router.openapi.test_document import check

ASKED: dict[str, Any] = {
    "model": MODEL,
    "input": "hi",
    "include": [OUTPUT_LOGPROBS],
    "top_logprobs": 2,
}


async def whole(cluster: Cluster, **asked: Any) -> dict[str, Any]:
    reply = await cluster.client.post("/v1/responses", json={**ASKED, **asked})
    assert reply.status_code == 200, reply.text
    response: dict[str, Any] = reply.json()
    check("ResponseObject", response)
    Response.model_validate(response)
    return response


async def streamed(cluster: Cluster, **asked: Any) -> list[dict[str, Any]]:
    body = {**ASKED, **asked, "stream": True}
    return events_of((await cluster.client.post("/v1/responses", json=body)).text)


def messages_of(response: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of text in a response."""
    items = (item for item in response["output"] if item["type"] == "message")
    return [part for item in items for part in item["content"]]


def text_of(logprobs: list[dict[str, Any]]) -> str:
    return b"".join(bytes(token["bytes"]) for token in logprobs).decode()


@pytest.mark.parametrize("together", [1, 3, 1000])
async def test_a_text(start: Start, tokenizer: Tokenizer, together: int) -> None:
    ids = [tokenizer.token_to_id(c) for c in "aðŁ¦Ĭb"]
    cluster = await start(speaks([*ids, EOS], together=together))
    [part] = messages_of(await whole(cluster))
    assert [token["logprob"] for token in part["logprobs"]] == [logprob_of(i) for i in ids]
    assert all(len(token["top_logprobs"]) == 2 for token in part["logprobs"])
    assert text_of(part["logprobs"]) == part["text"] == "a🦊b"
    events = await streamed(cluster)
    assert messages_of(events[-1]["response"]) == [part]
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    told = [token for event in deltas for token in event["logprobs"]]
    bare = [{name: token[name] for name in ("token", "logprob")} for token in part["logprobs"]]
    assert [{name: token[name] for name in ("token", "logprob")} for token in told] == bare
    [done] = [e for e in events if e["type"] == "response.output_text.done"]
    assert done["logprobs"] == told
    ResponseTextDoneEvent.model_validate(done)
    for event in deltas:
        ResponseTextDeltaEvent.model_validate(event)
    for event in deltas[:-1]:  # characters of several tokens come with the last of them
        assert event["logprobs"], event


@pytest.mark.parametrize("together", [1, 4, 1000])
async def test_tokens_of_reasoning_and_calls_are_left_out(
    start: Start, tokenizer: Tokenizer, together: int
) -> None:
    ids = tokenizer.encode(f"<think>\nhm, so\n</think>\n\nHello < 5. {CALL}").ids
    script = speaks([*ids, EOS], together=together)
    cluster = await start(script, reasoning_parser="qwen3")
    for response in (
        await whole(cluster, tools=[WEATHER]),
        (await streamed(cluster, tools=[WEATHER]))[-1]["response"],
    ):
        assert {item["type"] for item in response["output"]} >= {"reasoning", "function_call"}
        [part] = messages_of(response)
        assert part["text"].strip() == "Hello < 5."
        assert text_of(part["logprobs"]).strip() == "Hello < 5."


async def test_they_are_sent_for_include_alone(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(speaks([*tokenizer.encode("hello").ids, EOS]))
    [part] = messages_of(await whole(cluster, include=None))
    assert part["logprobs"] == []
    response = await whole(cluster, top_logprobs=None)
    [part] = messages_of(response)
    assert part["logprobs"] and not any(token["top_logprobs"] for token in part["logprobs"])
    assert response["top_logprobs"] == 0
    async with client_of(cluster) as client, client.responses.stream(**ASKED) as stream:
        final = await stream.get_final_response()
    assert final.output[0].content[0].logprobs  # type: ignore[union-attr]
    for wrong in (21, -1, "2"):
        body = {**ASKED, "top_logprobs": wrong}
        reply = await cluster.client.post("/v1/responses", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "top_logprobs")


async def test_the_end_of_a_long_stream_does_not_repeat_them(
    start: Start, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_logprobs, "MAX_REPEATED_LOGPROBS", 3 * 4)
    cluster = await start(speaks([*[tokenizer.token_to_id("a")] * 5, EOS]))
    events = await streamed(cluster)
    deltas = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    assert sum(map(len, deltas)) == 5
    assert messages_of(events[-1]["response"])[0]["logprobs"] == []
    [part] = messages_of(await whole(cluster))
    assert len(part["logprobs"]) == 5
