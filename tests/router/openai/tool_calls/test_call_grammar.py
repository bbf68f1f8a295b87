"""Calls: what an output may be under each choice, and what a parser makes of it."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from router.common.errors import ApiError
from router.openai.bodies.output_formats import StructuredOutputs
from router.openai.chat.output_plan import OutputPlanner
from router.openai.tool_calls.added_tokens import AddedTokenVocabulary
from router.openai.tool_calls.families.deepseek import DEEPSEEK_V3
from router.openai.tool_calls.families.gemma import GEMMA4
from router.openai.tool_calls.families.hermes import HERMES
from router.openai.tool_calls.families.llama import LLAMA3_JSON
from router.openai.tool_calls.families.mistral import MISTRAL
from router.openai.tool_calls.families.pythonic import PYTHONIC
from router.openai.tool_calls.families.qwen_xml import QWEN3_CODER
from router.openai.tool_calls.families.syntaxes import SYNTAXES
from router.openai.tool_calls.marked_calls import MarkedCalls
from router.openai.tool_calls.tool_syntax import ToolCallSyntax
from tests.router.openai.chat.weather import (
    ALLOWED,
    ARGUMENTS,
    NAMED,
    SCHEMAS,
    VOCABS,
    parsed,
    planned,
    wish,
)
from tests.router.openai.tool_calls.writing import written

everywhere = pytest.mark.parametrize("vocab", VOCABS)
each = pytest.mark.parametrize("syntax", SYNTAXES.values(), ids=list(SYNTAXES))


@everywhere
@each
def test_what_each_choice_lets_through(syntax: ToolCallSyntax, vocab: str) -> None:
    fits = VOCABS[vocab].fits
    one = written(syntax, ("weather", ARGUMENTS))
    two = written(syntax, ("stop-all", "{}"), ("weather", ARGUMENTS))
    wrong = written(syntax, ("weather", '{"city": "Bonn"}'))
    unknown = written(syntax, ("rain", "{}"))
    texts = ["", "Just text { with <marks> [", one, two, wrong, unknown, one + "text"]
    for choice, parallel, good in [
        (None, True, [0, 1, 2, 3]),
        ("auto", False, [0, 1, 2]),
        ("required", True, [2, 3]),
        ("required", False, [2]),
        (NAMED, True, [2]),
        (ALLOWED, True, [2]),
    ]:
        grammar = planned(syntax, vocab, choice, parallel).grammar
        assert [i for i, text in enumerate(texts) if fits(grammar, text)] == good, choice


@everywhere
@each
def test_free_text_before_calls(syntax: ToolCallSyntax, vocab: str) -> None:
    plan = planned(syntax, vocab)
    call = written(syntax, ("weather", ARGUMENTS))
    if syntax.trigger:
        text = "<think>I look.</think>\n"
        assert VOCABS[vocab].fits(plan.grammar, text + call)
        assert VOCABS[vocab].fits(plan.grammar, text)
        assert parsed(plan, text + call) == (text, [("weather", ARGUMENTS)])
    assert not VOCABS[vocab].fits(plan.grammar, "a" + written(syntax, ("rain", "{}"))) or (
        not syntax.trigger
    )


@everywhere
@each
@pytest.mark.parametrize("choice", ["required", NAMED, None])
def test_whatever_a_grammar_lets_through_is_parsed(
    syntax: ToolCallSyntax, vocab: str, choice: Any
) -> None:
    plan = planned(syntax, vocab, choice)
    first = written(syntax, ("weather", ARGUMENTS)).partition("weather")[0] + "weather"
    first += "(" if syntax is PYTHONIC else ""  # a list of words is free text until then
    begin = first if choice is None else ""
    for seed in range(5):
        text = VOCABS[vocab].walk(plan.grammar, random.Random(seed), begin)
        content, calls = parsed(plan, text)
        assert calls and not content
        for name, given in calls:
            jsonschema.validate(json.loads(given), SCHEMAS[name])


@pytest.mark.parametrize("syntax", [s for s in SYNTAXES.values() if isinstance(s, MarkedCalls)])
def test_one_text_is_read_whatever_its_white_space(syntax: MarkedCalls) -> None:
    plan = planned(syntax, "letters")
    calls = [("weather", ARGUMENTS), ("stop-all", "{}")]
    tight = written(syntax, *calls).replace("\n", "").replace('": ', '":').replace(', "a', ',"a')
    tight = tight.replace('"units":', '"units": ').replace('"city":', '"city": ')
    assert parsed(plan, tight)[1] == calls
    assert parsed(plan, written(syntax, *calls) + "\n")[1] == calls


@everywhere
def test_a_format_for_the_content(vocab: str) -> None:
    form = {"type": "json_object"}
    plan = planned(HERMES, vocab, form=form)
    call = written(HERMES, ("weather", ARGUMENTS))
    good = ['{"a":1}', call]
    assert [VOCABS[vocab].fits(plan.grammar, t) for t in [*good, "text", "text" + call]] == [
        *(True, True),
        *(False, False),
    ]
    # A call that must come has no content; calls that must not come leave only the content.
    assert planned(HERMES, vocab, "required", form=form) == planned(HERMES, vocab, "required")
    assert planned(HERMES, vocab, "none", form=form).new_parser() is None
    with pytest.raises(ApiError, match="as JSON does") as error:
        planned(LLAMA3_JSON, vocab, form=form)
    assert error.value.param == "response_format"
    with pytest.raises(ApiError, match="regex"):
        OutputPlanner(AddedTokenVocabulary.of(VOCABS[vocab].tokenizer)).plan(
            wish(), structured=StructuredOutputs(regex="a")
        )


def test_special_tokens_are_shown_where_they_mark_calls() -> None:
    special: list[ToolCallSyntax] = [MISTRAL, DEEPSEEK_V3, GEMMA4]
    visible: list[ToolCallSyntax] = [HERMES, QWEN3_CODER, LLAMA3_JSON]
    for syntax in special:  # their marks are
        assert planned(syntax, "tokens").show_special
        assert not planned(syntax, "letters").show_special
    for syntax in visible:  # <tool_call> is not
        assert not planned(syntax, "tokens").show_special


def test_llama_may_write_its_tag_before_calls() -> None:
    call = "<|python_tag|>" + written(LLAMA3_JSON, ("weather", ARGUMENTS))
    for choice in (None, "required"):
        plan = planned(LLAMA3_JSON, "tokens", choice)
        assert VOCABS["tokens"].fits(plan.grammar, call)
        assert parsed(plan, call) == ("", [("weather", ARGUMENTS)])
    assert not VOCABS["letters"].fits(planned(LLAMA3_JSON, "letters", "required").grammar, call)


def test_special_tokens_stay_out_of_the_text() -> None:
    grammar = planned(HERMES, "tokens").grammar
    assert not VOCABS["tokens"].fits(grammar, "a<|im_start|>b")
