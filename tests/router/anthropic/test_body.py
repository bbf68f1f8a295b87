"""Bodies of ``/v1/messages`` become chats, or are refused by the name of their field."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from router.anthropic.body import parse_count, parse_messages
from router.anthropic.conversation import chat_messages, system_text
from router.anthropic.tools import ToolDefaults, short_name
from router.common.errors import ApiError
from router.openai.bodies.reasoning_options import template_options

ASK: dict[str, Any] = {
    "model": "m",
    "max_tokens": 10,
    "messages": [{"role": "user", "content": "hi"}],
}
READ = {"name": "Read", "description": "reads", "input_schema": {"type": "object"}}


def say(role: str, *blocks: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": b} if isinstance(b, str) else b for b in blocks]
    return {"role": role, "content": content}


def use(name: str = "a", **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": name, "name": "Read", "input": given}


def result(text: Any, name: str = "a", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": name, "content": text, **fields}


def told(*messages: dict[str, Any], **body: Any) -> list[tuple[str, str]]:
    """Roles and texts of the chat."""
    chat = parse_messages({**ASK, "messages": list(messages), **body}).chat
    return [(message.role, message.content or "") for message in chat.messages]


def refused(**body: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        parse_messages({**ASK, **body})
    assert raised.value.status == 400
    return raised.value


# ---- conversations --------------------------------------------------------------------------


def test_blocks_become_messages() -> None:
    chat = parse_messages(
        {
            **ASK,
            "system": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}],
            "messages": [
                say("user", "one", "two"),
                say(
                    "assistant",
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    "Reading",
                    use("a", path="é"),
                    use("b"),
                ),
                say("user", result("12", "a"), result([{"type": "text", "text": "x"}], "b"), "go"),
            ],
        }
    ).chat
    assert [m.model_dump(exclude_none=True) for m in chat.messages] == [
        {"role": "system", "content": "A\n\nB"},
        {"role": "user", "content": "one\ntwo"},
        {
            "role": "assistant",
            "content": "Reading",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": name,
                    "type": "function",
                    "function": {
                        "name": "Read",
                        "arguments": json.dumps(given, ensure_ascii=False),
                    },
                }
                for name, given in (("a", {"path": "é"}), ("b", {}))
            ],
        },
        {"role": "tool", "content": "12", "tool_call_id": "a"},
        {"role": "tool", "content": "x", "tool_call_id": "b"},
        {"role": "user", "content": "go"},
    ]


def test_system_messages_before_the_first_turn_belong_to_the_head() -> None:
    assert told(say("system", "B"), say("system", "C"), say("user", "hi"), system="A") == [
        ("system", "A\n\nB\n\nC"),
        ("user", "hi"),
    ]


def test_inline_system_messages_are_folded_where_they_stand() -> None:
    assert told(
        say("user", "hi"),
        say("system", "after a user"),
        say("assistant", "yes"),
        say("system", "after an assistant"),
        say("user", "go"),
        say("assistant", use()),
        say("system", "between"),
        say("user", result("12")),
        say("system", "after a result"),
    ) == [
        ("user", "hi\n\nafter a user"),
        ("assistant", "yes"),
        ("user", "after an assistant\n\ngo"),
        ("assistant", ""),
        ("tool", "12\n\nbetween\n\nafter a result"),
    ]


def test_inline_system_messages_without_a_user_turn_become_one() -> None:
    assert told(
        say("user", "hi"), say("assistant", "yes"), say("system", "a"), say("system", "b")
    ) == [
        ("user", "hi"),
        ("assistant", "yes"),
        ("user", "a\n\nb"),
    ]
    assert told(
        say("user", "hi"), say("assistant", "yes"), say("system", "a"), say("assistant", "no")
    )[2:] == [("user", "a"), ("assistant", "no")]


def test_a_system_message_after_results_and_text_joins_the_text() -> None:
    assert told(
        say("user", "hi"),
        say("assistant", use()),
        say("system", "early"),
        say("user", result("12"), "text"),
        say("system", "late"),
    )[2:] == [("tool", "12"), ("user", "text\n\nearly\n\nlate")]


def test_messages_of_one_role_in_a_row_are_one_turn() -> None:
    assert told(
        say("user", "a"), say("user", "b"), say("assistant", "c"), say("assistant", "d")
    ) == [("user", "a\nb"), ("assistant", "cd")]


def test_the_billing_header_of_claude_code_is_dropped() -> None:
    header = "x-anthropic-billing-header: cc_version=2.1.181; cch=0ab1;"
    body = {**ASK, "system": [{"type": "text", "text": text} for text in (header, "Be kind")]}
    chat = parse_messages(body).chat
    assert [message.content for message in chat.messages] == ["Be kind", "hi"]


def test_changes_of_tools_in_system_messages_are_skipped() -> None:
    change = {"type": "tool_addition", "tool": READ}
    assert told(say("user", "hi"), say("system", change)) == [("user", "hi")]


def test_results_that_failed_say_so() -> None:
    failed = [("12", "Error: 12"), ("Error: no", "Error: no"), ("<tool_use_error>x", None)]
    for text, shown in failed:
        turn = say("user", result(text, is_error=True))
        assert told(say("user", "hi"), say("assistant", use()), turn)[-1] == ("tool", shown or text)


def test_found_tools_are_named() -> None:
    found = [{"type": "tool_reference", "tool_name": "Read"}]
    turn = say("user", result(found))
    assert told(say("user", "hi"), say("assistant", use()), turn)[-1] == ("tool", "Read")


def test_text_before_calls_ends_without_a_line_break() -> None:
    assert told(say("user", "hi"), say("assistant", "See:\n", use()), say("user", result("")))[
        1
    ] == (
        "assistant",
        "See:",
    )


EDIT = {
    "name": "Read",
    "input_schema": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "all": {"type": "boolean", "default": False},
            "limit": {"type": "integer", "default": 0},
            "block": {"type": "boolean", "default": True},
        },
        "required": ["path", "block"],
    },
}


@pytest.mark.parametrize(
    ("sent", "rendered"),
    [
        ({"all": False, "path": "a"}, {"path": "a"}),
        ({"all": False, "limit": 0, "path": "a"}, {"path": "a"}),
        ({"path": "a", "all": False}, {"path": "a", "all": False}),
        ({"all": True, "path": "a"}, {"all": True, "path": "a"}),
        ({"limit": False, "path": "a"}, {"limit": False, "path": "a"}),
        ({"all": False}, {"all": False}),
        ({"block": True, "path": "a"}, {"block": True, "path": "a"}),
        ({}, {}),
    ],
)
def test_defaults_that_the_client_has_put_first_are_left_out(
    sent: dict[str, Any], rendered: dict[str, Any]
) -> None:
    """Claude Code does so with calls in which the model has left an argument out."""
    messages = [say("user", "go"), say("assistant", use(**sent)), say("user", result("1"))]
    chat = parse_messages({**ASK, "messages": messages, "tools": [EDIT]}).chat
    [call] = chat.messages[1].model_dump()["tool_calls"]
    assert call["function"]["arguments"] == json.dumps(rendered)


@pytest.mark.parametrize("schema", [{}, {"properties": []}, {"properties": {"all": 1}}])
def test_schemas_without_properties_have_no_defaults(schema: dict[str, Any]) -> None:
    tool = {"name": "Read", "input_schema": {"required": {"a": 1}, **schema}}
    body = {**ASK, "messages": [say("user", "go"), say("assistant", use(all=False))]}
    chat = parse_messages({**body, "tools": [tool]}).chat
    [call] = chat.messages[1].model_dump()["tool_calls"]
    assert call["function"]["arguments"] == '{"all": false}'


def test_many_messages_take_linear_time() -> None:
    parsed = parse_messages(
        {**ASK, "messages": [say("user", "hi"), *[say("system", "x" * 10)] * 4000]}
    )
    assert len(parsed.chat.messages) == 1
    blocks = [{"type": "text", "text": "x" * 1000}] * 1000
    began = time.process_time()
    messages = parse_count_messages([{"role": "user", "content": blocks}] * 50)
    chat_messages(system_text([]), messages, ToolDefaults(()))
    assert time.process_time() - began < 5


def parse_count_messages(messages: list[Any]) -> Any:
    from router.anthropic.body import PromptBody

    return PromptBody.model_validate({"model": "m", "messages": messages}).messages


# ---- fields ---------------------------------------------------------------------------------


def test_fields_that_mean_the_same_in_a_chat() -> None:
    chat = parse_messages(
        {
            **ASK,
            "stop_sequences": ["x"],
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "stream": True,
            "tools": [READ],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "output_config": {"effort": "low"},
        }
    ).chat
    assert (chat.stop, chat.temperature, chat.top_p, chat.top_k) == (("x",), 0.5, 0.9, 7)
    assert chat.stream and chat.max_completion_tokens == 10
    assert chat.tools is not None and chat.tools[0].function.name == "Read"
    assert (chat.tool_choice, chat.parallel_tool_calls) == ("required", False)
    assert chat.reasoning_effort == "low"


@pytest.mark.parametrize(
    ("thinking", "options", "budget"),
    [
        (None, {}, None),
        ({"type": "disabled"}, {"enable_thinking": False}, None),
        ({"type": "between_tools"}, {"enable_thinking": False}, None),
        ({"type": "adaptive", "display": "omitted"}, {"enable_thinking": True}, None),
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}, 1024),
    ],
)
def test_thinking(thinking: Any, options: dict[str, Any], budget: int | None) -> None:
    chat = parse_messages({**ASK, "thinking": thinking}).chat
    shown = template_options(chat.reasoning_effort, chat.chat_template_kwargs)
    assert options.items() <= shown.items()
    assert bool(shown) == bool(options)
    assert chat.thinking_token_budget == budget


def test_thinking_off_goes_before_an_effort() -> None:
    body = {**ASK, "thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}
    assert parse_messages(body).chat.reasoning_effort == "none"


def test_tools_of_the_server_are_dropped() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    chat = parse_messages({**ASK, "tools": [search, {**READ, "type": "custom"}]}).chat
    assert chat.tools is not None and [tool.function.name for tool in chat.tools] == ["Read"]
    assert parse_messages({**ASK, "tools": [search]}).chat.tools is None
    for kind in ("auto", "none"):
        assert parse_messages({**ASK, "tools": [search], "tool_choice": {"type": kind}})
    forced = {"type": "tool", "name": "web_search"}
    assert refused(tools=[search, READ], tool_choice=forced).param == "tool_choice.name"
    assert refused(tools=[search], tool_choice={"type": "any"}).param == "tool_choice"


def test_unknown_fields_are_ignored_and_named() -> None:
    known = {"metadata": {"user_id": "u"}, "context_management": {"edits": []}, "speed": "fast"}
    assert parse_messages({**ASK, **known, "new": 5, "x" * 200: 1}).ignored == ("new", "x" * 64)
    assert len(parse_messages({**ASK, **{f"f{i}": 1 for i in range(500)}}).ignored) == 32
    marked = {**READ, "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}
    block = {
        "type": "text",
        "text": "hi",
        "cache_control": {"type": "ephemeral"},
        "citations": None,
    }
    assert not parse_messages({**ASK, "tools": [marked], "messages": [say("user", block)]}).ignored


def test_a_count_needs_no_bound() -> None:
    body = {"model": "m", "messages": ASK["messages"], "max_tokens": -5, "stream": "?"}
    assert parse_count(body).chat.max_output_tokens is None


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": None}, "max_tokens", "is required"),
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": None}, "messages", "is required"),
        ({"messages": "hi"}, "messages", "an array"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0]", "'user'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "array of blocks"),
        ({"messages": [say("user", IMAGE)]}, "messages[0].content", "[0] is of type 'image'"),
        ({"messages": [say("user", {"type": "document"})]}, "messages[0].content", "text only"),
        (
            {"messages": [say("user", result([IMAGE]))]},
            "messages[0].content[0].content",
            "text only",
        ),
        ({"messages": [say("user", use())]}, "messages[0].content[0]", "'tool_result'"),
        ({"messages": [say("user", {"type": ["x"]})]}, "messages[0].content[0]", "with a type"),
        (
            {"messages": [say("assistant", {**use(), "name": "no spaces"})]},
            "messages[0].content[0].name",
            "must match",
        ),
        ({"system": [IMAGE]}, "system", "text only"),
        ({"tools": [{"name": "Read"}]}, "tools[0].input_schema", "is required"),
        ({"tools": [{**READ, "name": ""}]}, "tools[0].name", "must match"),
        ({"tools": [READ, READ], "tool_choice": {"type": "on"}}, "tool_choice.type", "'auto'"),
        ({"thinking": {"type": "maybe"}}, "thinking.type", "'enabled'"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort", "'low'"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema", "is required"),
        ({"stop_sequences": [""]}, "stop_sequences", "empty string"),
        ({"temperature": 5}, "temperature", "at most 2"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "is not supported"),
        ({"container": "c"}, "container", "is not supported"),
        ({"tools": [{**READ, "description": "x" * 300_000}]}, "tools", "bytes of JSON"),
    ],
)
def test_refusals_name_the_field(body: dict[str, Any], field: str, says: str) -> None:
    error = refused(**body)
    assert error.param == field
    assert says in error.message


def test_what_is_empty_is_not_refused() -> None:
    assert parse_messages({**ASK, "mcp_servers": [], "container": None, "tools": []})


def test_short_names_are_stable_and_differ() -> None:
    names = ["a" * 64 + end for end in ("b", "c")]
    short = [short_name(name) for name in names]
    assert len(set(short)) == 2
    assert all(len(name) == 64 for name in short)
    assert short_name(short[0]) == short[0]
