"""Tool calls of each model family, over fake workers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from router.openai.tool_calls.families.syntaxes import SYNTAXES
from tests.router.conftest import Start
from tests.router.fake_worker import speaks
from tests.router.openai.tool_calls.writing import written

EOS = 0
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
ARGUMENTS = '{"city": "Köln, \\"am\\" Rhein", "days": 3}'
each = pytest.mark.parametrize("name", SYNTAXES)


@each
@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_each_family(
    start: Start, tokenizer: Tokenizer, name: str, stream: bool
) -> None:
    text = written(SYNTAXES[name], ("weather", ARGUMENTS), ("weather", "{}"))
    ids = tokenizer.encode(text).ids
    cluster = await start(speaks([*ids, EOS], together=2), tool_parser=name)
    response = await cluster.chat(tools=[TOOL], stream=stream)
    calls: list[dict[str, Any]] = [{"arguments": ""}, {"arguments": ""}]
    if stream:
        chunks = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
        choices = [chunk["choices"][0] for chunk in chunks]
        deltas = [choice["delta"] for choice in choices]
        for call in [call for delta in deltas for call in delta.get("tool_calls", ())]:
            calls[call["index"]]["name"] = call["function"].get("name") or "weather"
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
        assert not any(delta.get("content") for delta in deltas)
        finish = choices[-1]["finish_reason"]
    else:
        [choice] = response.json()["choices"]
        calls = [call["function"] for call in choice["message"]["tool_calls"]]
        assert choice["message"]["content"] is None
        finish = choice["finish_reason"]
    assert finish == "tool_calls"
    assert [call["arguments"] for call in calls] == [ARGUMENTS, "{}"]
    assert cluster.workers[0].requests[0].request.sampling.grammar


@each
async def test_a_forced_call_that_is_cut_shows_no_marks(
    start: Start, tokenizer: Tokenizer, name: str
) -> None:
    ids = tokenizer.encode(written(SYNTAXES[name], ("weather", ARGUMENTS))).ids
    for size in (1, 2, 3, len(ids) // 3, len(ids) - 1):  # some end within a character
        cluster = await start(speaks(ids[:size], stop=False), tool_parser=name)
        response = await cluster.chat(tools=[TOOL], tool_choice="required")
        [choice] = response.json()["choices"]
        assert not choice["message"]["content"]
        assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_a_stop_string_cuts_is_not_a_finished_one(
    start: Start, tokenizer: Tokenizer, stream: bool
) -> None:
    ids = tokenizer.encode(written(SYNTAXES["hermes"], ("weather", ARGUMENTS))).ids
    cluster = await start(speaks([*ids, EOS]))
    for stop, reason in (("Rhein", "stop"), ("</tool_call>", "tool_calls")):
        response = await cluster.chat(tools=[TOOL], stop=stop, stream=stream)
        text = response.text.split("\n\n")[-3][6:] if stream else response.text
        [choice] = json.loads(text)["choices"]
        assert choice["finish_reason"] == reason


async def test_no_tools_are_no_error(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(speaks([*tokenizer.encode("hi").ids, EOS]))
    for more in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        response = await cluster.chat(tools=[], **more)
        assert response.json()["choices"][0]["message"]["content"] == "hi"
    response = await cluster.chat(tools=[], tool_choice="required")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tool_choice"


async def test_an_object_may_have_a_schema(start: Start, tokenizer: Tokenizer) -> None:
    cluster = await start(speaks([*tokenizer.encode('{"days":3}').ids, EOS]))
    schema = TOOL["function"]["parameters"]
    await cluster.chat(response_format={"type": "json_object", "schema": schema})
    grammar = cluster.workers[0].requests[-1].request.sampling.grammar
    assert "days" in grammar and "additionalProperties" in grammar
