"""Text of models, cut anywhere, becomes reasoning and the text outside of it."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.openai.reasoning.reasoning_parser import ReasoningParser
from router.openai.reasoning.reasoning_syntax import (
    GEMMA4,
    MISTRAL,
    QWEN3,
    REASONING_SYNTAXES,
    ReasoningStart,
    ReasoningSyntax,
)

OPENER = "<tool_call>"


def split(
    text: str,
    start: ReasoningStart,
    syntax: ReasoningSyntax = QWEN3,
    cuts: list[int] | None = None,
    takes: bool = False,
) -> tuple[str, str]:
    parser = ReasoningParser(syntax, start, (OPENER,))
    places = [0, *sorted({min(c, len(text)) for c in cuts or ()}), len(text)]
    reasoning = outside = ""
    for begin, end in pairwise(places):
        if takes and end < len(text) and parser.takes(text[begin:end]):
            reasoning += text[begin:end]
            continue
        part = parser.push(text[begin:end], last=end == len(text))
        reasoning, outside = reasoning + part.reasoning, outside + part.outside
    if len(places) == 2 and not text:
        parser.push("", last=True)
    return reasoning, outside


@pytest.mark.parametrize(
    ("start", "text", "reasoning", "outside"),
    [
        ("open", "hm\n</think>\n\nyes", "hm", "yes"),
        ("open", "\n\nhm\n\nso\n\n</think>yes", "hm\n\nso", "yes"),
        ("open", "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("open", "cut in the mid", "cut in the mid", ""),
        ("open", "cut in the marker </thi", "cut in the marker </thi", ""),
        ("open", "a < b </ c </think>  d", "a < b </ c ", "  d"),
        ("open", "hm</think>\n</think>\n\n</think>yes", "hm", "yes"),
        ("open", "hm</think>\n<think>\nmore</think>\n\nyes", "hm\nmore", "yes"),
        ("open", "hm</think>yes</think>no", "hm", "yes</think>no"),
        ("open", 'I call <tool_call>{"a": 1}', "I call ", '<tool_call>{"a": 1}'),
        ("open", "a <tool> </tool_call> b</think>c", "a <tool> </tool_call> b", "c"),
        ("open", "</think>yes", "", "yes"),
        ("open", "hm</think>\n\n", "hm", ""),
        ("open", "hm</think>" + "\n" * 200 + "yes\n", "hm", "yes\n"),
        ("open", "hm</think>" + "\n" * 200 + "<think>yes", "hm", "<think>yes"),
        ("waiting", "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("waiting", "\n <think>hm</think>yes", "hm", "yes"),
        ("waiting", "yes <think>no</think>", "", "yes <think>no</think>"),
        ("waiting", "\n\nyes", "", "\n\nyes"),
        ("waiting", "<thinking>", "", "<thinking>"),
        ("waiting", "<th", "", "<th"),
        ("waiting", " " * 70 + "<think>", "", " " * 70 + "<think>"),
        ("waiting", "</think>\n\nyes", "", "yes"),
        ("closed", "<think>\n", "", "<think>\n"),
    ],
)
def test_what_is_reasoning(start: ReasoningStart, text: str, reasoning: str, outside: str) -> None:
    assert split(text, start) == (reasoning, outside)
    assert split(text, start, cuts=list(range(len(text)))) == (reasoning, outside)


def test_families_that_write_no_newlines_keep_those_of_the_text() -> None:
    assert split("[THINK]\nhm\n[/THINK]\nyes", "waiting", MISTRAL) == ("\nhm\n", "\nyes")
    text = "<|channel>thought\nhm\n<channel|>yes"
    assert split(text, "waiting", GEMMA4) == ("hm\n", "yes")
    assert split("<|channel>thought\n<channel|>yes", "waiting", GEMMA4) == ("", "yes")


PIECES = st.sampled_from(
    [
        *("<think>", "</think>", "<th", "</", "<", ">", "\n", " ", " " * 30, "hm", OPENER),
        *("[THINK]", "[/THINK]", "<|channel>thought\n", "<channel|>", "<|channel>"),
    ]
)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(PIECES, max_size=12).map("".join),
    st.sampled_from(["open", "waiting", "closed"]),
    st.sampled_from(sorted(REASONING_SYNTAXES.values())),
    st.lists(st.integers(0, 120), max_size=8),
)
def test_cuts_change_nothing(
    text: str, start: ReasoningStart, syntax: ReasoningSyntax, cuts: list[int]
) -> None:
    whole = split(text, start, syntax)
    assert split(text, start, syntax, cuts) == whole
    assert split(text, start, syntax, cuts, takes=True) == whole
    assert split(text, start, syntax, list(range(len(text))), takes=True) == whole


def test_a_marker_is_held_back_and_text_before_it_is_not() -> None:
    parser = ReasoningParser(QWEN3, "open")
    assert parser.push("hm </th", last=False) == ("hm ", "")
    assert not parser.takes("x") and parser.push("ink", last=False) == ("", "")
    assert not parser.done
    assert parser.push(">", last=False) == ("", "")
    assert parser.push("\n\nyes", last=False) == ("", "yes")
    assert parser.done


def test_most_texts_need_not_be_pushed() -> None:
    parser = ReasoningParser(QWEN3, "open")
    assert not parser.takes("so"), "the first text may be a marker"
    parser.push("so", last=False)
    assert parser.takes(" it is")
    assert not any(map(parser.takes, ("", "\n", "a <", "</think>")))


@pytest.mark.parametrize("text", ["\n", " ", "<", "</think", "x", "<think>", "</think>"])
def test_time_is_linear(text: str) -> None:
    took = []
    for count in (2000, 16000):
        parser = ReasoningParser(QWEN3, "open", (OPENER,))
        begun = time.thread_time()
        for _ in range(count):
            parser.push(text, last=False)
        took.append(time.thread_time() - begun)
    assert took[1] < 30 * max(took[0], 0.002)
