"""Tool calls by OpenAI's client. The demo model cannot choose a tool: grammars make it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.e2e.test_clients import GREEDY, client

__all__ = ["client"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


class Weather(BaseModel):
    """The weather in a city."""

    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


class Clock(BaseModel):
    """The time in a zone."""

    zone: str = Field(pattern="^UTC[+-][0-9]$")


TOOLS: Any = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Clock)]
ARGUMENTS: dict[str, type[BaseModel]] = {"Weather": Weather, "Clock": Clock}
QUESTION: Any = {"role": "user", "content": "weather in Oslo?"}
ASKED: Any = {**GREEDY, "messages": [QUESTION], "tools": TOOLS, "max_completion_tokens": 600}
NAMED: Any = {"type": "function", "function": {"name": "Clock"}}
ONE: Any = {"tool_choice": "required", "parallel_tool_calls": False}


def test_a_tool_is_required(client: OpenAI) -> None:
    given = {**ASKED, "max_completion_tokens": 2000}  # some like to call many
    choice = client.chat.completions.create(**given, tool_choice="required").choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        assert call.type == "function" and call.id
        ARGUMENTS[call.function.name].model_validate_json(call.function.arguments)


def test_a_tool_is_named(client: OpenAI) -> None:
    choice = client.chat.completions.parse(**ASKED, tool_choice=NAMED).choices[0]
    assert choice.message.tool_calls
    assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Clock)
    assert choice.finish_reason == "stop"  # as OpenAI has it for a named function


def test_no_tool_is_wanted(client: OpenAI) -> None:
    given = {**ASKED, "max_completion_tokens": 16}
    message = client.chat.completions.create(**given, tool_choice="none").choices[0].message
    assert message.content and not message.tool_calls


@pytest.mark.parametrize("seed", range(4))
def test_one_call_at_most(client: OpenAI, seed: int) -> None:
    given = {**ASKED, "temperature": 1, "seed": seed}
    calls = client.chat.completions.create(**given, **ONE).choices[0].message.tool_calls
    assert calls is not None and len(calls) == 1


def test_a_round_trip(client: OpenAI) -> None:
    """Free text or a call; the call's result goes back, and an answer comes."""
    auto = client.chat.completions.create(**{**ASKED, "max_completion_tokens": 32})
    assert auto.choices[0].finish_reason in ("stop", "length", "tool_calls")
    asking = client.chat.completions.create(**ASKED, **ONE).choices[0].message
    assert asking.tool_calls
    result: Any = {
        "role": "tool",
        "tool_call_id": asking.tool_calls[0].id,
        "content": json.dumps({"celsius": 3}),
    }
    talk: Any = [QUESTION, asking.model_dump(exclude_none=True), result]
    given = {**ASKED, "messages": talk, "max_completion_tokens": 16}
    answer = client.chat.completions.create(**given)
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls
    assert answer.usage is not None and auto.usage is not None
    assert answer.usage.prompt_tokens > auto.usage.prompt_tokens
    assert client.chat.completions.create(**given, tool_choice="none").choices[0].message.content


def test_streamed_calls_add_up(client: OpenAI) -> None:
    whole = client.chat.completions.create(**ASKED, **ONE).choices[0].message.tool_calls
    assert whole is not None and whole[0].type == "function"
    pieces = 0
    for _ in range(10):  # a busy machine may send a short call at once
        name, arguments, ids, pieces = "", "", set[str](), 0
        for part in client.chat.completions.create(**ASKED, **ONE, stream=True):
            for call in part.choices[0].delta.tool_calls or []:
                assert call.index == 0 and call.function is not None
                ids |= {call.id} if call.id else set()
                name += call.function.name or ""
                arguments += call.function.arguments or ""
                pieces += 1
        assert (name, arguments) == (whole[0].function.name, whole[0].function.arguments)
        assert len(ids) == 1
        if pieces > 1:
            break
    assert pieces > 1


def test_the_stream_helper_parses_arguments(client: OpenAI) -> None:
    with client.chat.completions.stream(**ASKED, **ONE) as stream:
        done = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert len(done) == 1 and final.message.tool_calls
    parsed = final.message.tool_calls[0].function.parsed_arguments
    assert isinstance(parsed, ARGUMENTS[done[0].name]) and parsed == done[0].parsed_arguments
    assert final.finish_reason == "tool_calls"


def test_tools_or_a_format(client: OpenAI) -> None:
    given = {**ASKED, "response_format": Weather, "tool_choice": "auto"}
    message = client.chat.completions.parse(**given).choices[0].message
    assert message.tool_calls or isinstance(message.parsed, Weather)
