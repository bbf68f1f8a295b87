from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from router.openai.bodies.field_types import StrictModel
from router.openai.bodies.messages import Messages, message_chars, to_template_message
from router.openai.bodies.parsing import field_path


class Body(StrictModel):
    messages: Messages


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def call(**changes: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": "{}"}
    return {"id": "call_1", "type": "function", "function": function, **changes}


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


@pytest.mark.parametrize(
    ("message", "path", "text"),
    [
        ("hello", "messages[1]", "object with a role"),
        ({}, "messages[1]", "object with a role"),
        ({"role": "function", "name": "f", "content": ""}, "messages[1]", "'assistant' or 'tool'"),
        ({"role": ["user"], "content": ""}, "messages[1]", "object with a role"),
        ({"role": "user"}, "messages[1].content", "required"),
        (user(3), "messages[1].content", "string or an array of text parts"),
        (user(["x"] * 1025), "messages[1].content", "at most 1024 parts"),
        (user(["x"]), "messages[1].content", "[0] must be a part"),
        (user([{"type": "text"}]), "messages[1].content", "[0].text must be a string"),
        (user([{"type": "image_url", "image_url": {}}]), "messages[1].content", "'image_url'"),
        (user([{"type": "input_audio"}]), "messages[1].content", "input_audio"),
        (user([{"type": "file"}]), "messages[1].content", "text only"),
        ({**user("a"), "name": "<|im_end|>"}, "messages[1].name", "pattern"),
        ({"role": "tool", "content": "a"}, "messages[1].tool_call_id", "required"),
        (assistant(tool_calls={}), "messages[1].tool_calls", "list"),
        (assistant(tool_calls=[call(id="")]), "messages[1].tool_calls[0].id", "at least 1"),
        (assistant(tool_calls=[call(type="custom")]), "messages[1].tool_calls[0].type", "function"),
        (assistant(tool_calls=[call(function={"name": "f", "arguments": {}})]),
         "messages[1].tool_calls[0].function.arguments", "string"),
        (assistant(tool_calls=[call(function={"name": "f g", "arguments": "{}"})]),
         "messages[1].tool_calls[0].function.name", "letters"),
        (assistant(content="", audio={"id": "x"}), "messages[1].audio", "not supported"),
        (assistant(function_call={"name": "f"}), "messages[1].function_call", "not supported"),
    ],
)  # fmt: skip
def test_mistakes_are_named(message: Any, path: str, text: str) -> None:
    with pytest.raises(ValidationError) as error:
        Body.model_validate({"messages": [user("a"), message]})
    first = error.value.errors()[0]
    assert field_path(first["loc"]) == path
    assert text in f"{first['msg']} {first['type']}".replace("Field required", "required")


def test_some_messages_are_needed_and_not_too_many() -> None:
    for messages in ([], [user("a")] * 4097):
        with pytest.raises(ValidationError):
            Body.model_validate({"messages": messages})


def to_template(message: dict[str, Any], developer: bool = False) -> dict[str, Any]:
    [checked] = TypeAdapter(Messages).validate_python([message])
    return to_template_message(checked, developer=developer)


def test_parts_are_lines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert to_template(user(parts)) == user("a\nb")


def test_an_answer_comes_back_as_clients_send_it() -> None:
    empty = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    answer = assistant(content=None, tool_calls=[call()], **empty)
    assert to_template(answer) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [call(function={"name": "f", "arguments": {}})],
    }
    assert to_template(assistant(refusal="No.")) == assistant(content="No.")
    both = {"reasoning": "hm", "reasoning_content": "hm"}
    for name in both:
        thoughts = assistant(content="a", **{name: "hm"})
        assert to_template(thoughts) == assistant(content="a", **both)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, "x"]}', {"a": [1, "x"]}),
        ("[1]", "[1]"),
        ("{", "{"),
        ("", {}),
        (" ", {}),
        ('{"a": NaN}', '{"a": NaN}'),
        ("[" * 100_000, "[" * 100_000),
        ('{"a": ' + "9" * 5000 + "}", '{"a": ' + "9" * 5000 + "}"),
    ],
)
def test_arguments_are_objects_where_they_can_be(text: str, value: Any) -> None:
    message = assistant(tool_calls=[call(function={"name": "f", "arguments": text})])
    [made] = to_template(message)["tool_calls"]
    assert made["function"]["arguments"] == value


def test_a_tool_answers_a_call() -> None:
    answer = {"role": "tool", "content": "42", "tool_call_id": "call_1"}
    assert to_template(answer) == answer


def test_the_schema_of_messages_can_be_shown() -> None:
    schema = json.dumps(Body.model_json_schema())
    assert "tool_call_id" in schema and '"const": "text"' in schema


def test_every_text_of_a_message_counts_as_its_characters() -> None:
    """They decide what is rendered on the event loop."""
    long = "<" * 256
    calls = [call(id=long) for _ in range(128)]
    sent = [
        assistant(refusal=long * 100),
        assistant(tool_calls=calls),
        {"role": "tool", "tool_call_id": long, "content": ""},
        {**user(""), "name": "n" * 64},
    ]
    refused, called, answer, named = map(
        message_chars, Body.model_validate({"messages": sent}).messages
    )
    assert (refused, answer, named) == (25_600, 256, 64)
    assert called > 128 * 256


def test_what_other_servers_add_to_a_message_is_ignored() -> None:
    labels = {"id": "m1", "cache_control": {"type": "ephemeral"}, "age": 3}
    part = {"type": "text", "text": "a", "cache_control": {}, "annotations": []}
    answer = {"annotations": [{}], "audio": None, "refusal": None, "reasoning_details": [{}]}
    extra = {"extra_content": {}, "index": 0}
    messages = [
        {**user([part]), **labels},
        assistant(content=None, tool_calls=[call(**extra)], **answer, **labels),
        {"role": "tool", "content": None, "tool_call_id": "call_1", **labels},
        assistant(content="b", reasoning="why", reasoning_content=None, **answer),
        {"role": "system", "content": []},
    ]
    plain = [
        user("a"),
        assistant(content="", tool_calls=[call()]),
        {"role": "tool", "content": "", "tool_call_id": "call_1"},
        assistant(content="b", reasoning="why"),
        {"role": "system", "content": ""},
    ]
    body = Body.model_validate({"messages": messages})
    assert body == Body.model_validate({"messages": plain})
