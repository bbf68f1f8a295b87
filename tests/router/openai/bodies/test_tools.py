"""Tools and choices among them: what is shown, what is told, what is refused."""

# ruff: noqa: RUF001 - DeepSeek's marks
from __future__ import annotations

from typing import Any, cast, get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from router.common.errors import ApiError
from router.openai.bodies.tools import ToolChoice, ToolOptions, Tools
from router.openai.chat.output_plan import OutputPlan, OutputPlanner
from router.openai.parser_names import ToolParserName
from router.openai.tool_calls.added_tokens import AddedTokenVocabulary
from router.openai.tool_calls.families.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from router.openai.tool_calls.families.gemma import GEMMA4
from router.openai.tool_calls.families.hermes import HERMES
from router.openai.tool_calls.families.llama import LLAMA3_JSON
from router.openai.tool_calls.families.mistral import MISTRAL, MISTRAL_ARGS
from router.openai.tool_calls.families.qwen_xml import QWEN3_CODER
from router.openai.tool_calls.families.syntaxes import SYNTAXES, detect_syntax, find_syntax
from router.openai.tool_calls.tool_syntax import ToolCallSyntax
from tests.router.openai.chat.toy import STYLES
from tests.router.openai.chat.weather import ALLOWED, NAMED, TOOLS, bare, checked, planned, wish


def test_tools_that_must_not_be_called_are_not_shown() -> None:
    assert planned(HERMES, "letters", "none") == OutputPlan()
    shown = planned(HERMES, "letters").tools
    assert [tool["function"] for tool in shown] == [TOOLS[0]["function"], {"name": "stop-all"}]
    # The choice among tools leaves what is shown as it is, and so a cached prompt.
    assert planned(HERMES, "letters", ALLOWED).tools == shown


@pytest.mark.parametrize(
    ("choice", "called", "reason", "told"),
    [
        (None, True, "stop", "tool_calls"),
        (None, False, "stop", "stop"),
        (None, True, "length", "length"),
        ("required", True, "stop", "tool_calls"),
        (NAMED, True, "stop", "stop"),
    ],
)
def test_finish_reasons(choice: Any, called: bool, reason: str, told: str) -> None:
    assert planned(HERMES, "letters", choice).finish_reason(reason, called=called) == told


def tool(parameters: Any = None, name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


@pytest.mark.parametrize(
    ("given", "param", "why"),
    [
        (ToolOptions(choice="required"), "tool_choice", "only allowed with tools"),
        (wish({"type": "function", "function": {"name": "rain"}}),
         "tool_choice.function.name", "'rain' is not among tools"),
        (wish({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            NAMED, {"type": "function", "function": {"name": "rain"}}]}}),
         "tool_choice.allowed_tools.tools[1].function.name", "'rain'"),
        (wish(tools=[tool(), tool()]), "tools[1].function.name", "taken"),
        (wish(tools=[tool({"type": "string"})]), "tools[0].function.parameters", "'object'"),
        (wish(tools=[tool(), tool({"properties": {"a": {"type": "foo"}}}, "g")]),
         "tools[1].function.parameters", "foo"),
        (wish(tools=[tool({"not": {}}, strict=True)]), "tools[0].function.parameters", '"not"'),
    ],
)  # fmt: skip
def test_wishes_that_cannot_be_met(given: ToolOptions, param: str, why: str) -> None:
    with pytest.raises(ApiError, match=why) as error:
        checked(bare(), OutputPlanner(AddedTokenVocabulary.of(bare())).plan(given))
    assert (error.value.status, error.value.param) == (400, param)


def test_no_tools_need_no_choice() -> None:
    planner = OutputPlanner(AddedTokenVocabulary.of(bare()))
    assert TypeAdapter(Tools).validate_python([]) == []
    for choice in (None, "none", "auto"):
        assert planner.plan(ToolOptions([], choice)) == OutputPlan()


def test_without_strict_a_keyword_that_no_grammar_holds_is_let_go() -> None:
    loose = wish(tools=[tool({"not": {"required": ["a"]}, "properties": {"b": {}}})])
    assert checked(bare(), OutputPlanner(AddedTokenVocabulary.of(bare())).plan(loose)).grammar


@pytest.mark.parametrize(
    "tools", [[{}], [{"type": "custom", "custom": {"name": "f"}}], [tool(name="a b")],
              [tool(name="a" * 65)], [tool("x")], [tool()] * 129, [tool(code=1)]],
)  # fmt: skip
def test_tools_are_checked(tools: Any) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Tools).validate_python(tools)


@pytest.mark.parametrize("choice", ["any", 3, {}, {"type": "function"}, {"type": "custom"}])
def test_choices_are_checked(choice: Any) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(ToolChoice).validate_python(choice)


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        (STYLES["chatml"], HERMES),
        (STYLES["llama3"], LLAMA3_JSON),
        ("{{ '[AVAILABLE_TOOLS]' }}[TOOL_CALLS]", MISTRAL),
        ("[TOOL_CALLS]{{ name }}[ARGS]", MISTRAL_ARGS),
        ("'<tool_call>\\n<function=' + name + '>' '<parameter=' + key + '>'", QWEN3_CODER),
        ("'<｜tool▁calls▁begin｜>' + name + '\\n```json\\n' + arguments", DEEPSEEK_V3),
        ("'<｜tool▁calls▁begin｜>' + name + '<｜tool▁sep｜>' + arguments", DEEPSEEK_V31),
        ("""'<|tool_call>call:' + name + '{' + '<|"|>'""", GEMMA4),
        ("", HERMES),
    ],
)
def test_the_template_shows_the_syntax(template: str, syntax: ToolCallSyntax) -> None:
    assert detect_syntax(template) == syntax


def test_the_syntax_can_be_configured() -> None:
    assert set(get_args(ToolParserName)) == {"auto", *SYNTAXES}
    assert find_syntax("auto", STYLES["chatml"]) == HERMES
    for name in SYNTAXES:
        assert find_syntax(cast(ToolParserName, name), STYLES["chatml"]).name == name
