"""``/v1/responses`` as the official SDK sees it: its stream helper checks the events."""

from __future__ import annotations

import json
from typing import Any, Literal

import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from tokenizers import Tokenizer

from tests.router.conftest import MODEL, Start
from tests.router.fake_worker import speaks
from tests.router.http.api.test_chat import CALL, EOS, client_of
from tests.router.openai.responses.streams import events_of

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


async def stream_of(start: Start, ids: list[int], **asked: Any) -> tuple[list[Any], Response]:
    """The events on the wire, and the final response of the helper."""
    cluster = await start(speaks([*ids, EOS]))
    async with (
        client_of(cluster) as client,
        client.responses.stream(model=MODEL, input="hi", **asked) as stream,
    ):
        final = await stream.get_final_response()
    asked.pop("text_format", None)
    body = {"model": MODEL, "input": "hi", "stream": True, **asked}
    raw = await cluster.client.post("/v1/responses", json=body)
    return events_of(raw.text), final


async def test_a_stream_of_text(start: Start, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello 🦊 there").ids
    _, final = await stream_of(start, ids)
    assert final.output_text == "hello 🦊 there"
    assert final.status == "completed"
    assert final.id.startswith("resp_")
    assert final.output[0].type == "message" and final.output[0].id.startswith("msg_")
    assert final.usage is not None
    assert final.usage.output_tokens == len(ids) + 1
    assert final.usage.total_tokens == final.usage.input_tokens + final.usage.output_tokens


async def test_a_stream_with_a_call(start: Start, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"One moment. {CALL}").ids
    _, final = await stream_of(start, ids, tools=[WEATHER])
    message, call = final.output
    assert message.type == "message"
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Köln 🦊"})
    assert call.parsed_arguments == {"city": "Köln 🦊"}  # type: ignore[attr-defined]
    assert call.call_id.startswith("call_")
    assert call.id is not None and call.id.startswith("fc_")


class Point(pydantic.BaseModel):
    x: Literal[1, 2]


async def test_a_parsed_text(start: Start, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode('{"x":2}').ids
    _, final = await stream_of(start, ids, text_format=Point)
    assert final.output_parsed == Point(x=2)  # type: ignore[attr-defined]


async def test_a_whole_response(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(speaks([*tokenizer.encode(CALL).ids, EOS]))
    async with client_of(cluster) as client:
        response = await client.responses.create(
            model=MODEL, input="hi", tools=[WEATHER], metadata={"a": "b"}, instructions="be kind"
        )
        counted = await client.responses.input_tokens.count(
            model=MODEL, input="hi", tools=[WEATHER], instructions="be kind"
        )
    [call] = response.output
    assert call.type == "function_call" and call.status == "completed"
    assert (response.metadata, response.instructions) == ({"a": "b"}, "be kind")
    assert response.tools[0].type == "function"
    assert (response.store, response.truncation) == (False, "disabled")  # type: ignore[attr-defined]
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens


async def test_a_plain_stream(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(speaks([*tokenizer.encode("hello").ids, EOS]))
    async with client_of(cluster) as client:
        stream = await client.responses.create(model=MODEL, input="hi", stream=True)
        events: list[ResponseStreamEvent] = [event async for event in stream]
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    for event in events:  # the SDK itself does not validate what it reads
        type(event).model_validate(event.model_dump(warnings=False))


@pytest.mark.parametrize("bound", [None, 3])
async def test_a_cut_is_an_end_unless_the_client_set_the_limit(
    start: Start, tokenizer: Tokenizer, bound: int | None
) -> None:
    cluster = await start(speaks(tokenizer.encode("hello").ids[:3], stop=False))
    asked: Any = {} if bound is None else {"max_output_tokens": bound}
    async with client_of(cluster) as client:
        stream = await client.responses.create(model=MODEL, input="hi", stream=True, **asked)
        *_, last = [event async for event in stream]
        whole = await client.responses.create(model=MODEL, input="hi", **asked)
    assert last.type == ("response.completed" if bound is None else "response.incomplete")
    assert last.response.incomplete_details is not None
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert whole.status == "incomplete"
