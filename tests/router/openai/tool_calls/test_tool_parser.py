"""The parsers of calls: however a text is cut, the same comes out."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.openai.tool_calls.families.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from router.openai.tool_calls.families.gemma import GEMMA4
from router.openai.tool_calls.families.hermes import HERMES
from router.openai.tool_calls.families.llama import LLAMA3_JSON
from router.openai.tool_calls.families.mistral import MISTRAL, MISTRAL_ARGS
from router.openai.tool_calls.families.qwen_xml import QWEN3_CODER
from router.openai.tool_calls.families.syntaxes import SYNTAXES
from router.openai.tool_calls.tool_parser import CallStart
from router.openai.tool_calls.tool_syntax import ToolCallSyntax
from tests.router.openai.tool_calls.writing import Calls, joined, run, written

ARGUMENTS = '{"a": "}\\"{[", "b": [{"c": {}}]}'
SCHEMA: dict[str, Any] = {
    "properties": {
        "a": {"type": "string"},
        "b": {"type": "array"},
        "n": {"type": ["integer", "null"]},
        "s": {"type": ["string", "null"]},
        "x": {"type": "string"},
    }
}
SCHEMAS = {"f": SCHEMA, "g": SCHEMA, "get-it_2": SCHEMA}
each = pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=list(SYNTAXES))
names = ['{"name": "', '", "arguments": ', '", "parameters": ', "f"]
signs = ["{", "}", "[", "]", "; ", ", ", "\n", " ", '"', "\\", "hello", ":", "<", "null", "1"]
tags = ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>"]
tags += ["</parameter>", "<parameter=s>", "<function=", "<parameter=n>", "\n</parameter>\n"]
others = ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"]
gemma = ["<|tool_call>call:f{", "<tool_call|>", '<|"|>', "a:", "s:", "n:", "true", "b:["]
marks = st.sampled_from([*tags, *others, *gemma, *names, *signs])
call = st.tuples(st.sampled_from(["f", "get-it_2"]), st.sampled_from(["{}", ARGUMENTS]))


@st.composite
def outputs(draw: st.DrawFn) -> tuple[ToolCallSyntax, str]:
    syntax = draw(st.sampled_from(list(SYNTAXES.values())))
    calls = st.lists(call, min_size=1, max_size=3).map(lambda given: written(syntax, *given))
    parts = draw(st.lists(st.one_of(marks, calls, st.text(max_size=5)), max_size=10))
    return syntax, "".join(parts)


def parse(syntax: ToolCallSyntax, *pieces: str, forced: bool = False) -> tuple[str, Calls]:
    return run(syntax.new_parser(SCHEMAS, forced=forced), pieces)


@given(outputs(), st.lists(st.integers(0, 300), max_size=30), st.booleans())
def test_cuts_change_nothing(
    output: tuple[ToolCallSyntax, str], cuts: list[int], forced: bool
) -> None:
    syntax, text = output
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    whole = parse(syntax, text, forced=forced)
    assert parse(syntax, *pieces, forced=forced) == whole
    assert parse(syntax, *text, forced=forced) == whole


@given(outputs())
def test_text_without_calls_is_all_content(output: tuple[ToolCallSyntax, str]) -> None:
    syntax, text = output
    content, calls = parse(syntax, text)
    # The start of a call that is cut is dropped.
    assert calls or text.startswith(content)
    assert calls or content == text or syntax.trigger[:9] in text[len(content) :]


@given(st.sampled_from([QWEN3_CODER, GEMMA4]), st.data())
def test_arguments_of_calls_that_end_are_json(syntax: ToolCallSyntax, data: st.DataObject) -> None:
    pieces = st.lists(st.one_of(marks, st.text(max_size=5)), max_size=12).map("".join)
    end = (
        "\n</parameter>\n</function>\n</tool_call>"
        if syntax is QWEN3_CODER
        else '<|"|>}}}<tool_call|>'
    )
    text = syntax.begin + ("<function=f>" if syntax is QWEN3_CODER else "call:f{")
    _, calls = parse(syntax, text + data.draw(pieces) + end + " done")
    assert calls
    for _, arguments in calls[:-1]:
        assert isinstance(json.loads(arguments), dict)


@each
def test_calls_come_in_order_with_their_arguments(syntax: ToolCallSyntax) -> None:
    calls = [("f", ARGUMENTS), ("g", "{}"), ("f", '{"x": "é🦊"}')]
    assert parse(syntax, written(syntax, *calls)) == ("", calls)


@each
def test_a_call_that_is_cut_leaves_no_marks_in_the_content(syntax: ToolCallSyntax) -> None:
    text = written(syntax, ("f", ARGUMENTS), ("g", '{"x": "y"}'))
    whole = parse(syntax, text, forced=True)[1]
    for size in range(len(text)):
        content, calls = parse(syntax, text[:size], forced=True)
        assert content == ""
        assert [name for name, _ in calls] == [name for name, _ in whole[: len(calls)]]


@each
def test_a_character_that_is_cut_within_a_call_is_not_content(syntax: ToolCallSyntax) -> None:
    """The marks of DeepSeek have characters of several bytes, which a limit on tokens may cut."""
    text = written(syntax, ("f", ARGUMENTS), ("g", '{"x": "y"}'))

    def content(text: str, *, forced: bool) -> str:
        parser = syntax.new_parser(SCHEMAS, forced=forced)
        return joined([*parser.push(text), *parser.flush("\ufffd")])[0]

    parser = syntax.new_parser(SCHEMAS)
    for size in range(1, len(text)):
        assert content(text[:size], forced=True) == ""
        parser.push(text[size - 1])
        assert not parser.has_open_call or content(text[:size], forced=False) == ""
    for said in ("", "a ", written(syntax, ("f", "{}")) + " a"):
        assert content(said, forced=False) == f"{parse(syntax, said)[0]}\ufffd"


@each
def test_a_call_is_open_until_its_arguments_end(syntax: ToolCallSyntax) -> None:
    text = written(syntax, ("f", ARGUMENTS))
    parser = syntax.new_parser(SCHEMAS)
    states = [parser.has_open_call for one in text if parser.push(one) is not None]
    opened, closed = states.index(True), len(states) - states[::-1].index(True)
    assert all(states[opened:closed]) and not any(states[:opened] + states[closed:])
    assert opened < closed and not states[-1]
    parser.flush()
    assert parser.called and not parser.has_open_call


@each
def test_content_before_a_call_that_is_cut_stays(syntax: ToolCallSyntax) -> None:
    if syntax.trigger:
        text = "I look." + written(syntax, ("f", ARGUMENTS))
        for size in range(len("I look.") + len(syntax.trigger), len(text)):
            assert parse(syntax, text[:size])[0] == "I look."


@each
def test_long_outputs_take_linear_time(syntax: ToolCallSyntax) -> None:
    mark = syntax.trigger or '{"name": "'
    value = written(syntax, ("f", json.dumps({"a": "\n<parameter=<\n</parameter" * 1000})))
    for text in (mark * 5_000, mark + " " * 50_000, value, "\n" * 50_000):
        start = time.process_time()
        parse(syntax, text)
        parse(syntax, *[text[at : at + 4] for at in range(0, len(text), 4)])
        assert time.process_time() - start < 5


def test_arguments_go_out_as_they_come() -> None:
    parser = HERMES.new_parser({})
    assert parser.push('I look.<tool_call>\n{"name": "f", "arguments": ')[0] == ("I look.",)
    [start, piece] = parser.push('{"a": 1')
    assert isinstance(start, CallStart) and (start.call, start.name) == (0, "f")
    assert start.id.startswith("call_") and piece == (0, '{"a": 1')
    assert parser.push("2") == [(0, "2")]
    assert parser.push("}}") == [(0, "}")]
    assert parser.push("\n</tool_call>") == []
    assert parser.flush() == [] and parser.called


@pytest.mark.parametrize(
    ("syntax", "before"),
    [
        (QWEN3_CODER, "<tool_call>\n<function=f>\n<parameter=a>\n"),
        (GEMMA4, '<|tool_call>call:f{a:<|"|>'),
    ],
)
def test_long_strings_go_out_as_they_come(syntax: ToolCallSyntax, before: str) -> None:
    parser = syntax.new_parser(SCHEMAS)
    started, begun = [*parser.push(before), *parser.push("one ")], parser.push('"two"')
    assert joined(started) == ("", [("f", '{"a": "one ')])
    assert begun == [(0, '\\"two\\"')]


def test_each_call_has_an_id_of_its_own() -> None:
    deltas = MISTRAL.new_parser({}).push(written(MISTRAL, ("f", "{}"), ("f", "{}")))
    first, second = [d.id for d in deltas if isinstance(d, CallStart)]
    assert first != second and len(first) == 9 and first.isalnum()  # its templates want that


def test_ids_that_a_model_writes_are_those_of_its_calls() -> None:
    text = "[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{}[TOOL_CALLS]g[CALL_ID]abcDEF123[ARGS]{}"
    deltas = MISTRAL_ARGS.new_parser({}).push(text)
    first, second = [d.id for d in deltas if isinstance(d, CallStart)]
    assert first == "abcDEF123" and second != first


def test_text_is_not_held_back_for_long() -> None:
    parser = HERMES.new_parser({})
    assert parser.push("a < b") == [("a < b",)]
    assert parser.push(" <tool_") == [(" ",)]
    assert parser.push("x") == [("<tool_x",)]


@pytest.mark.parametrize(
    ("syntax", "text", "content", "calls"),
    [
        (HERMES, "<tool_call>oops</tool_call>", None, []),
        (HERMES, '<tool_call>{"name": "f"', "", []),
        (HERMES, "a <tool_ca", None, []),
        (HERMES, '<tool_call>{"name": "f", "arguments": 3}', None, []),
        (HERMES, "\n\n" + written(HERMES, ("f", "{}")) + "\n", "", [("f", "{}")]),
        (HERMES, "\n\n", "\n\n", []),
        (HERMES, written(HERMES, ("f", "{}")) + " done", " done", [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>\n{"name": "g",'
         ' "arguments": {}}', "", [("f", "{}"), ("g", "{}")]),
        (LLAMA3_JSON, '{"name": "Bob"}', '{"name": "Bob"}', []),
        (LLAMA3_JSON, '{"name": "Bob"', "", []),  # a call that was cut: no text begins so
        (LLAMA3_JSON, '{"nam', '{"nam', []),
        (LLAMA3_JSON, 'Say {"name": "f", "parameters": {}}', None, []),
        (LLAMA3_JSON, '{"name": "f", "parameters": {}};', "", [("f", "{}")]),
        (LLAMA3_JSON, '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        (LLAMA3_JSON, '{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        (LLAMA3_JSON, '{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        (MISTRAL, "[TOOL_CALLS] [", "", []),
        (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS]{}", "", [("f", "{}")]),
        (DEEPSEEK_V3, written(DEEPSEEK_V3, ("f", "{}")) + "\n", "", [("f", "{}")]),
        (DEEPSEEK_V31, written(DEEPSEEK_V31, ("f", "{}")).removesuffix(DEEPSEEK_V31.end), "",
         [("f", "{}")]),
    ],
)  # fmt: skip
def test_what_is_no_call_is_content(
    syntax: ToolCallSyntax, text: str, content: str | None, calls: Calls
) -> None:
    assert parse(syntax, text) == (text if content is None else content, calls)
