from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.common.errors import ApiError, invalid
from router.openai.bodies.chat_body import ChatBody
from router.openai.bodies.messages import to_template_message
from router.openai.responses.body import RESPONSES_FIELDS, OpenFields, parse_responses

RUN: dict[str, Any] = {"type": "function", "name": "run", "parameters": {"type": "object"}}


def chat_of(items: Any, **fields: Any) -> ChatBody:
    return parse_responses({"model": "m", "input": items, **fields}).generation


def messages_of(items: Any, **fields: Any) -> list[dict[str, Any]]:
    chat = chat_of(items, **fields)
    return [to_template_message(message, developer=True) for message in chat.messages]


def call(call_id: str, name: Any = "run", **fields: Any) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": call_id, "name": name, "arguments": '{"a":1}'}
    return {**call, **fields}


def output(call_id: str, value: Any = "done") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": value}


def said(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def thought(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}


def test_a_string_is_what_the_user_says() -> None:
    assert messages_of("hi") == [{"role": "user", "content": "hi"}]
    assert messages_of("hi", instructions="be kind")[0] == {"role": "system", "content": "be kind"}


def test_a_turn_of_the_assistant_is_one_message() -> None:
    items = [
        said("user", "go"),
        thought("hm"),
        said("assistant", "I run it."),
        call("c1"),
        call("c2", "read", namespace="mcp"),
        output("c1"),
        output("c2", [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]),
    ]
    user, turn, first, second = messages_of(items)
    assert user == {"role": "user", "content": "go"}
    assert (turn["content"], turn["reasoning_content"]) == ("I run it.", "hm")
    assert [c["function"]["name"] for c in turn["tool_calls"]] == ["run", "mcp__read"]
    assert [c["id"] for c in turn["tool_calls"]] == ["c1", "c2"]
    assert first == {"role": "tool", "tool_call_id": "c1", "content": "done"}
    assert second["content"] == "a\nb"


def test_text_before_calls_ends_without_a_line_break() -> None:
    """Templates write that line break themselves: two would be another prompt."""
    said = {"role": "assistant", "content": "I look.\n"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    go = {"role": "user", "content": "go"}
    [_, with_call] = parse_responses({"model": "m", "input": [go, said, call]}).generation.messages
    assert with_call.content == "I look."
    [_, alone] = parse_responses({"model": "m", "input": [go, said]}).generation.messages
    assert alone.content == "I look.\n"


def test_reasoning_comes_from_content_or_summary_and_never_from_ciphertext() -> None:
    summary = [{"type": "summary_text", "text": "short"}]
    items: list[Any] = [
        {"type": "reasoning", "summary": summary, "content": None, "encrypted_content": "x"},
        said("assistant", "a"),
        said("user", "b"),
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        said("assistant", "c"),
    ]
    first, _, second = messages_of(items)
    assert first["reasoning_content"] == "short"
    assert "reasoning_content" not in second


def test_leading_system_texts_are_one_message() -> None:
    items = [said("developer", "a"), said("system", "b"), said("user", "hi")]
    system, user = messages_of(items, instructions="be kind")
    assert system == {"role": "system", "content": "be kind\n\na\n\nb"}
    assert user["content"] == "hi"


def test_later_system_texts_stay_where_they_stand() -> None:
    after_user = [said("user", "hi"), said("developer", "note")]
    assert messages_of(after_user) == [{"role": "user", "content": "hi\n\nnote"}]
    calls = [said("user", "go"), call("c1"), said("developer", "note"), call("c2"), output("c1")]
    *_, first, second = messages_of([*calls, output("c2")])
    assert (first["content"], second["content"]) == ("done", "done\n\nnote")
    after_answer = [said("user", "a"), said("assistant", "b"), said("developer", "note")]
    assert messages_of(after_answer)[-1] == {"role": "user", "content": "note"}
    *_, last = messages_of([*after_answer, said("user", "c")])
    assert last == {"role": "user", "content": "note\n\nc"}


ROLES = st.sampled_from(["user", "assistant", "developer", "call"])


@given(st.lists(ROLES, min_size=1, max_size=30))
def test_a_longer_conversation_begins_with_the_shorter_one(roles: list[str]) -> None:
    """A prompt ends before an answer; the one with the answer and more extends it."""
    items: list[Any] = [said("user", "start")]
    prompts = []
    for number, role in enumerate(roles):
        if role == "call":
            items += [call(f"c{number}"), output(f"c{number}")]
        else:
            items.append(said(role, f"{role} {number}"))
        if role != "assistant":
            prompts.append(messages_of(items))
            items.append(said("assistant", f"answer {number}"))
    for shorter, longer in itertools.pairwise(prompts):
        assert longer[: len(shorter)] == shorter


def test_tools_may_come_with_items() -> None:
    found = {"type": "tool_search_output", "call_id": "s1", "tools": [RUN, {"type": "mcp"}]}
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [{**RUN, "name": "early"}]},
        said("user", "go"),
        {"type": "tool_search_call", "call_id": "s1", "execution": "client", "arguments": {"q": 1}},
        found,
        call("c1"),
        output("c1"),
    ]
    chat = chat_of(items, tools=[{"type": "tool_search", "execution": "client"}])
    assert [tool.function.name for tool in chat.tools or ()] == ["tool_search", "early", "run"]
    _, turn, told, second, _ = messages_of(items)
    assert turn["tool_calls"][0]["function"] == {"name": "tool_search", "arguments": {"q": 1}}
    assert json.loads(told["content"]) == {"tools": ["run"]}
    assert second["tool_calls"][0]["function"]["name"] == "run"


def test_custom_calls_and_their_outputs() -> None:
    items = [
        said("user", "go"),
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a "b"'},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
    ]
    _, turn, told = messages_of(items)
    assert turn["tool_calls"][0]["function"]["arguments"] == {"input": 'a "b"'}
    assert told["content"] == "ok"


def test_null_contents_are_empty() -> None:
    answer = {"type": "message", "role": "assistant", "content": None}
    *_, turn, told = messages_of([said("user", "go"), answer, call("c1"), output("c1", None)])
    assert len(turn["tool_calls"]) == 1 and told["content"] == ""


def test_items_of_hosted_tools_are_left_out() -> None:
    hosted = [{"type": "web_search_call", "id": "ws"}, {"type": "compaction", "x": 1}]
    assert messages_of([*hosted, said("user", "hi")]) == messages_of("hi")


def test_an_image_in_an_output_does_not_end_the_session() -> None:
    image = {"type": "input_image", "image_url": "data:"}
    *_, told = messages_of([said("user", "go"), call("c1"), output("c1", [image])])
    assert told["content"] == "[An image, which this model cannot read.]"


@pytest.mark.parametrize(
    ("items", "param"),
    [
        (5, "input"),
        ([], "input"),
        ([said("system", "alone")], "input"),
        ([5], "input[0]"),
        ([{}], "input[0]"),
        ([{"type": 5}], "input[0]"),
        ([{"type": "item_reference", "id": "x"}], "input[0]"),
        ([{"type": "mcp_call"}], "input[0]"),
        ([{"role": "robot", "content": "x"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": [5]}], "input[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        (["x", call("")], "input[0]"),
        ([call("")], "input[0].call_id"),
        ([call("c", arguments={})], "input[0].arguments"),
        ([call("c", name=None)], "input[0].name"),
        ([call("c", namespace=5)], "input[0].namespace"),
        ([output("c", {})], "input[0].output"),
        ([{"type": "tool_search_output", "call_id": "c"}], "input[0].tools"),
        ([call(f"c{i}") for i in range(200)], "input[0].tool_calls"),
    ],
)
def test_the_wrong_item_is_named(items: Any, param: str) -> None:
    with pytest.raises(ApiError) as raised:
        chat_of(items)
    assert (raised.value.status, raised.value.param) == (400, param), raised.value
    assert param in raised.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "x"}}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"moderation": {}}, "moderation"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": "all"}, "include"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"min_tokens": 5, "max_output_tokens": 2}, "min_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"tools": "all"}, "tools"),
        ({"tools": [{**RUN, "description": 5}]}, "tools[0].description"),
        ({"stream": "yes"}, "stream"),
        ({"instructions": 5}, "instructions"),
    ],
)
def test_the_wrong_field_is_named(fields: Any, param: str) -> None:
    with pytest.raises(ApiError) as raised:
        chat_of("hi", **fields)
    assert (raised.value.status, raised.value.param) == (400, param), raised.value
    assert param in raised.value.message


def test_fields_without_effect_pass() -> None:
    ignored = dict.fromkeys(RESPONSES_FIELDS.without_effect, "anything")
    refused, passed = RESPONSES_FIELDS.refused, set(RESPONSES_FIELDS.passed)
    neutral = {name: values[0] for name, values in refused.items() if values}
    assert chat_of("hi", **ignored, **neutral, unknown=1) == chat_of("hi")
    null = dict.fromkeys([*refused, *(passed - {"model"}), *OpenFields.model_fields])
    del null["input"]
    assert chat_of("hi", **null) == chat_of("hi")


def test_what_is_asked_of_the_model() -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    wanted = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    chat = chat_of(
        "hi",
        text={"format": wanted, "verbosity": "low"},
        max_output_tokens=7,
        parallel_tool_calls=False,
        temperature=0.5,
        prompt_cache_key="session",
    )
    assert chat.response_format is not None and chat.response_format.type == "json_schema"
    assert chat.response_format.json_schema.schema_ == schema
    assert (chat.max_output_tokens, chat.parallel_tool_calls, chat.temperature) == (7, False, 0.5)
    assert chat.prompt_cache_key == "session"


@pytest.mark.parametrize(
    ("effort", "passed"),
    [("low", "low"), ("none", "none"), ("ultra", "high"), (3, "high"), (None, None), ([], "high")],
)
def test_an_unknown_effort_is_a_high_one(effort: Any, passed: str | None) -> None:
    chat = chat_of("hi", reasoning={"effort": effort, "summary": "auto"})
    assert chat.reasoning_effort == passed


def test_errors_about_the_chat_name_what_the_client_sent() -> None:
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [RUN]}]
    body = parse_responses({"model": "m", "input": [said("user", "hi")], "tools": tools})
    error = body.rename(
        invalid("tools[0].function.parameters is bad", "tools[0].function.parameters")
    )
    assert error.param == "tools[1].tools[0].parameters"
    assert error.message == "tools[1].tools[0].parameters is bad"
    error = body.rename(invalid("messages hold no tokens", "messages"))
    assert (error.message, error.param) == ("input hold no tokens", "input")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "text", "name", "tools", "output", "call_id"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
KINDS = [
    *("message", "reasoning", "function_call", "custom_tool_call", "tool_search_call"),
    *("function_call_output", "custom_tool_call_output", "tool_search_output"),
    *("additional_tools", "item_reference", "web_search_call", "of_2027"),
]
ITEMS = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS)},
    optional={
        "role": st.sampled_from(["user", "assistant", "developer"]) | JSON,
        "content": st.text(max_size=5) | JSON,
        "call_id": st.sampled_from(["a", "b"]) | JSON,
        "name": st.sampled_from(["run", "ü"]) | JSON,
        "namespace": st.sampled_from(["n", "functions"]) | JSON,
        "arguments": st.just("{}") | JSON,
        "input": st.text(max_size=5) | JSON,
        "output": st.text(max_size=5) | JSON,
        "tools": st.lists(st.sampled_from([RUN, {"type": "mcp"}])) | JSON,
        "summary": JSON,
    },
)


@given(st.lists(ITEMS | JSON, max_size=6), JSON, JSON)
def test_any_input_is_taken_or_refused(items: Any, tools: Any, choice: Any) -> None:
    for fields in ({}, {"tools": tools}, {"tool_choice": choice}, {"text": tools}):
        try:
            parse_responses({"model": "m", "input": items, **fields})
        except ApiError as error:
            assert error.status == 400
            assert error.param is None or not error.param.startswith("messages")
