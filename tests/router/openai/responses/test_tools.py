from __future__ import annotations

from typing import Any

import pytest

from router.common.errors import ApiError
from router.openai.bodies.field_types import NAME_PATTERN
from router.openai.bodies.tools import MAX_TOOLS
from router.openai.responses.tools import ToolName, ToolSet, tool_choice_for_chat


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object"}, **fields}


def namespace(name: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "", "tools": list(tools)}


def known(*tools: dict[str, Any]) -> ToolSet:
    found = ToolSet()
    found.add_all(list(tools), "tools")
    return found


def names(tools: ToolSet) -> list[str]:
    return [tool["function"]["name"] for tool in tools.for_chat]


def test_namespaces_are_joined_and_split_again() -> None:
    tools = known(function("run"), namespace("mcp__files", function("read__all"), function("run")))
    assert names(tools) == ["run", "mcp__files__read__all", "mcp__files__run"]
    assert tools.find("mcp__files__read__all").name == ToolName("read__all", "mcp__files")
    assert tools.find("run").name == ToolName("run")


def test_functions_of_the_default_namespace_have_bare_names() -> None:
    tools = known(namespace("functions", function("run")))
    assert names(tools) == ["run"]
    assert tools.find("run").name == ToolName("run")


def test_names_that_chats_do_not_take_are_changed_and_found_again() -> None:
    long, odd = "x" * 100, "files.read ü"
    tools = known(function(long), function(odd), namespace("n" * 60, function("read")))
    assert all(NAME_PATTERN.fullmatch(name) for name in names(tools))
    assert [tools.find(name).name for name in names(tools)] == [
        ToolName(long),
        ToolName(odd),
        ToolName("read", "n" * 60),
    ]
    assert tools.chat_name(ToolName(long)) == ToolName(long).for_chat()


def test_two_tools_whose_joined_names_are_equal_stay_two() -> None:
    tools = known(namespace("a__b", function("c")), namespace("a", function("b__c")))
    first, second = names(tools)
    assert first == "a__b__c" != second
    assert tools.find(second).name == ToolName("b__c", "a")
    assert tools.chat_name(ToolName("b__c", "a")) == second


def test_a_tool_that_comes_again_counts_once() -> None:
    tools = known(function("run", description="one"))
    assert tools.add_all([function("run", description="two")], "input[1].tools") == [
        ToolName("run")
    ]
    assert [tool["function"]["description"] for tool in tools.for_chat] == ["one"]


def test_tools_that_only_openai_executes_are_left_out() -> None:
    hosted = [{"type": kind} for kind in ("web_search", "mcp", "image_generation", "of_2027")]
    assert len(known(*hosted, {"type": "tool_search"})) == 0


def test_custom_tools_take_one_string_and_say_its_grammar() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    tools = known({"type": "custom", "name": "patch", "description": "Patch.", "format": grammar})
    [tool] = tools.for_chat
    assert list(tool["function"]["parameters"]["properties"]) == ["input"]
    assert tool["function"]["description"].startswith("Patch.\n\nThe input must match this lark")
    assert tools.find("patch").kind == "custom"


def test_a_search_that_the_client_executes_is_a_function() -> None:
    tools = known({"type": "tool_search", "execution": "client", "description": "Find."})
    assert names(tools) == ["tool_search"]
    assert tools.find("tool_search").kind == "tool_search"


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (5, "tools[0]"),
        ({"name": "x"}, "tools[0]"),
        ({"type": "function"}, "tools[0].name"),
        ({"type": "function", "name": 5}, "tools[0].name"),
        (function("x", parameters=[]), "tools[0].parameters"),
        (function("x", strict="yes"), "tools[0].strict"),
        ({"type": "namespace", "name": "n"}, "tools[0].tools"),
        (namespace("n", {"type": "function"}), "tools[0].tools[0].name"),
        ({"type": "custom", "name": "x", "format": 5}, "tools[0].format"),
    ],
)
def test_the_wrong_field_is_named(tool: Any, param: str) -> None:
    with pytest.raises(ApiError) as raised:
        ToolSet().add_all([tool], "tools")
    assert (raised.value.status, raised.value.param) == (400, param)


def test_there_are_not_more_tools_than_chats_take() -> None:
    with pytest.raises(ApiError, match="at most"):
        known(*[function(f"f{i}") for i in range(MAX_TOOLS + 1)])


TOOLS = known(
    function("run"),
    namespace("mcp", function("read")),
    {"type": "custom", "name": "patch"},
)


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "function", "name": "run"}, "run"),
        ({"type": "function", "name": "read", "namespace": "mcp"}, "mcp__read"),
        ({"type": "function", "name": "read"}, "mcp__read"),
        ({"type": "custom", "name": "patch"}, "patch"),
    ],
)
def test_a_tool_is_chosen_by_name(choice: Any, name: str) -> None:
    chosen = {"type": "function", "function": {"name": name}}
    assert tool_choice_for_chat(choice, TOOLS, sent=True) == chosen
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp"}, choice]}
    assert tool_choice_for_chat(allowed, TOOLS, sent=True) == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [chosen]},
    }


def test_modes() -> None:
    for mode in ("none", "auto", "required", None):
        assert tool_choice_for_chat(mode, TOOLS, sent=True) == mode
    for mode in ("none", "auto", None):
        assert tool_choice_for_chat(mode, ToolSet(), sent=True) is None
    only_hosted = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    assert tool_choice_for_chat(only_hosted, TOOLS, sent=True) == "none"


@pytest.mark.parametrize(
    "choice",
    [
        "always",
        5,
        {},
        {"type": 5},
        {"type": "web_search"},
        {"type": "function", "name": "unknown"},
        {"type": "function"},
        {"type": "allowed_tools", "mode": "never", "tools": []},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
        {"type": "allowed_tools", "mode": "auto", "tools": ["run"]},
    ],
)
def test_a_choice_that_cannot_be_honoured_is_refused(choice: Any) -> None:
    with pytest.raises(ApiError) as raised:
        tool_choice_for_chat(choice, TOOLS, sent=True)
    assert raised.value.status == 400
    assert raised.value.param is not None and raised.value.param.startswith("tool_choice")


def test_a_forced_tool_that_was_left_out_is_refused() -> None:
    with pytest.raises(ApiError, match="forces a tool"):
        tool_choice_for_chat("required", known({"type": "web_search"}), sent=True)
