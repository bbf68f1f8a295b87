"""The parser of calls: however a text is cut, the same comes out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.openai.tool_calls.tool_parser import CallStart, ToolParser
from router.openai.tool_calls.tool_syntax import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_ARGS,
    SYNTAXES,
    ToolCallSyntax,
)
from tests.router.openai.chat.weather import joined, written

ARGUMENTS = '{"a": "}\\"{[", "b": [{"c": {}}]}'
names = ['{"name": "', '", "arguments": ', '", "parameters": ', "f"]
signs = ["{", "}", "[", "]", "; ", ", ", "\n", " ", '"', "\\", "hello"]
marks = st.sampled_from(["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", *names, *signs])
call = st.tuples(st.sampled_from(["f", "get-it_2"]), st.sampled_from(["{}", ARGUMENTS, '{"a": "']))


@st.composite
def outputs(draw: st.DrawFn) -> tuple[ToolCallSyntax, str]:
    syntax = draw(st.sampled_from(list(SYNTAXES.values())))
    calls = st.lists(call, min_size=1, max_size=3).map(lambda given: written(syntax, *given))
    parts = draw(st.lists(st.one_of(marks, calls, st.text(max_size=5)), max_size=8))
    return syntax, "".join(parts)


def run(syntax: ToolCallSyntax, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolParser(syntax)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return joined([*deltas, *parser.flush()])


@given(outputs(), st.lists(st.integers(0, 300), max_size=30))
def test_cuts_change_nothing(output: tuple[ToolCallSyntax, str], cuts: list[int]) -> None:
    syntax, text = output
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    whole = run(syntax, [text])
    assert run(syntax, pieces) == whole
    assert run(syntax, list(text)) == whole


@given(outputs())
def test_text_without_calls_is_all_content(output: tuple[ToolCallSyntax, str]) -> None:
    syntax, text = output
    content, calls = run(syntax, [text])
    assert calls or content == text


@pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=list(SYNTAXES))
def test_calls_come_in_order_with_their_arguments(syntax: ToolCallSyntax) -> None:
    calls = [("f", ARGUMENTS), ("g", "{}"), ("f", '{"x": "é🦊"}')]
    assert run(syntax, [written(syntax, *calls)]) == ("", calls)


def test_arguments_go_out_as_they_come() -> None:
    parser = ToolParser(HERMES)
    assert parser.push('I look.<tool_call>\n{"name": "f", "arguments": ')[0] == ("I look.",)
    [start, piece] = parser.push('{"a": 1')
    assert isinstance(start, CallStart) and (start.call, start.name) == (0, "f")
    assert start.id.startswith("call_") and piece == (0, '{"a": 1')
    assert parser.push("2") == [(0, "2")]
    assert parser.push("}}") == [(0, "}")]
    assert parser.push("\n</tool_call>") == []
    assert parser.flush() == [] and parser.called


def test_each_call_has_an_id_of_its_own() -> None:
    parser = ToolParser(MISTRAL)
    deltas = parser.push(written(MISTRAL, ("f", "{}"), ("f", "{}")))
    first, second = [d.id for d in deltas if isinstance(d, CallStart)]
    assert first != second and len(first) == 9 and first.isalnum()  # its templates want that


def test_text_is_not_held_back_for_long() -> None:
    parser = ToolParser(HERMES)
    assert parser.push("a < b") == [("a < b",)]
    assert parser.push(" <tool_") == [(" ",)]
    assert parser.push("x") == [("<tool_x",)]


@pytest.mark.parametrize(
    ("syntax", "text", "content", "calls"),
    [
        (HERMES, "<tool_call>oops</tool_call>", "<tool_call>oops</tool_call>", []),
        (HERMES, '<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
        (HERMES, '<tool_call>{"name": "f", "arguments": 3}', None, []),
        (HERMES, "\n\n" + written(HERMES, ("f", "{}")) + "\n", "", [("f", "{}")]),
        (HERMES, "\n\n", "\n\n", []),
        (HERMES, written(HERMES, ("f", "{}")) + " done", " done", [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
        (LLAMA3_JSON, '{"name": "Bob"}', '{"name": "Bob"}', []),
        (LLAMA3_JSON, 'Say {"name": "f", "parameters": {}}', None, []),
        (LLAMA3_JSON, '{"name": "f", "parameters": {}};', ";", [("f", "{}")]),
        (MISTRAL, "[TOOL_CALLS] [", None, []),
        (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS]{}", "", [("f", "{}")]),
    ],
)
def test_what_is_no_call_is_content(
    syntax: ToolCallSyntax, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    assert run(syntax, [text]) == (text if content is None else content, calls)
