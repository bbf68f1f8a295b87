"""Qwen's tags: values by the tool's schema, in the grammar and in the parser."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from router.common.errors import ApiError
from router.openai.chat.output_plan import OutputPlan, OutputPlanner
from router.openai.tool_calls.added_tokens import AddedTokenVocabulary
from router.openai.tool_calls.families.qwen_xml import QWEN3_CODER
from tests.router.openai.chat.weather import VOCABS, checked, parsed, wish
from tests.router.openai.tool_calls.writing import Calls, run

PLACE = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
EVERY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "short": {"type": "string", "maxLength": 3},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
        "unit": {"enum": ["C", "F", 1, None]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "exact": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "at": {"$ref": "#/$defs/Place"},
        "many": {"type": "array", "items": {"$ref": "#/$defs/Place"}, "maxItems": 2},
    },
    "required": ["short", "unit"],
    "$defs": {"Place": PLACE},
}


def planned(parameters: dict[str, Any], vocab: str = "letters", **more: Any) -> OutputPlan:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}
    vocabulary = AddedTokenVocabulary.of(VOCABS[vocab].tokenizer)
    plan = OutputPlanner(vocabulary, QWEN3_CODER).plan(wish("required", tools=[tool]))
    return checked(VOCABS[vocab].tokenizer, plan)


def written(**values: str) -> str:
    parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()]
    return f"<tool_call>\n<function=f>\n{''.join(parts)}</function>\n</tool_call>"


@pytest.mark.parametrize("vocab", VOCABS)
def test_values_fit_their_schema(vocab: str) -> None:
    grammar = planned(EVERY, vocab).grammar
    base = {"short": "abc", "unit": "C"}
    good = [base, {"short": "", "unit": "1"}, {"short": "\n\n", "unit": "None"}]
    good += [{"text": "a\n<b>\n</parameter", **base}, {**base, "exact": "True", "maybe": "null"}]
    good += [{**base, "at": '{"x": 1}', "many": '[{"x": 1}, {"x": 2}]'}]
    good += [{"short": "a", "code": "AB-12", "unit": "F"}]
    bad = [{"short": "abcd", "unit": "C"}, {"short": "a"}, {"short": "a", "unit": "K"}]
    bad += [{**base, "days": "0"}, {**base, "days": "two"}, {**base, "at": "{}"}]
    bad += [{**base, "at": '{"x": 1, "y": 2}'}, {**base, "other": "1"}, {**base, "exact": "1"}]
    bad += [{"short": "a", "code": "ab-12", "unit": "F"}]
    bad += [{"text": "a</parameter>\n<parameter=short>", **base}]
    fits = VOCABS[vocab].fits
    assert [fits(grammar, written(**one)) for one in good] == [True] * len(good)
    assert [fits(grammar, written(**one)) for one in bad] == [False] * len(bad)


@pytest.mark.parametrize("vocab", VOCABS)
def test_what_the_grammar_lets_through_fits_the_schema(vocab: str) -> None:
    schema = {**EVERY, "properties": {k: v for k, v in EVERY["properties"].items() if k != "text"}}
    plan = planned(schema, vocab)
    for seed in range(8):
        [(name, given), *_] = parsed(plan, VOCABS[vocab].walk(plan.grammar, random.Random(seed)))[1]
        assert name == "f"
        jsonschema.validate(json.loads(given), schema)


def test_further_keys_only_where_the_schema_says_so() -> None:
    for more, fits in [({}, False), ({"additionalProperties": {"type": "integer"}}, True)]:
        grammar = planned({"properties": {"a": {}}, **more}).grammar
        assert VOCABS["letters"].fits(grammar, written(a="1", b="2")) is fits
        assert not VOCABS["letters"].fits(grammar, written(a="1", b="two"))
    assert VOCABS["letters"].fits(planned({"type": "object", "title": "t"}).grammar, written(b="2"))


def test_a_key_that_tags_cannot_hold_is_refused() -> None:
    with pytest.raises(ApiError, match="cannot name a property 'a>b'") as error:
        planned({"properties": {"a>b": {}}})
    assert error.value.param == "tools[0].function.parameters"


def test_definitions_are_bounded() -> None:
    size = 200
    defs = {f"d{i}": {"properties": {"n": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(size)}
    keys = {f"k{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i}"}} for i in range(size)}
    with pytest.raises(ApiError, match=r"too long|characters"):
        planned({"properties": keys, "$defs": defs})


SCHEMA = {"properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "z": {
    "type": ["string", "null"]}}}  # fmt: skip


def parse(text: str, forced: bool = False) -> tuple[str, Calls]:
    parser = QWEN3_CODER.new_parser({"f": SCHEMA}, forced=forced)
    return run(parser, list(text))


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<tool_call><function=f></function></tool_call>", "{}"),
        ("<function=f>\n<parameter=a>\nx\n</parameter>\n</function>", '{"a": "x"}'),
        ("<tool_call>\n<function=f>\n<parameter=a>x</parameter></function>", '{"a": "x"}'),
        ("<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</tool_call>", '{"a": "x"}'),
        ("<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>", '{"a": "x"}'),
        ("<tool_call>\n<function=f>\n<parameter=a>\nx\n</function>\n</tool_call>", '{"a": "x"}'),
        ("<tool_call>\n<function=f>\n<parameter=a>\nx\n<parameter=n>\n1\n</parameter>\n</function>",
         '{"a": "x", "n": 1}'),
        ("<tool_call>\n<function=f>\n<parameter=a>\nx\n<parameter=q>\n</parameter>\n</function>",
         '{"a": "x\\n<parameter=q>"}'),
        (written(a="x").replace("</tool_call>", "</tool_call></tool_call>"), '{"a": "x"}'),
        (written(a="</parameter> and </function>"), '{"a": "</parameter> and </function>"}'),
        (written(n=" 3 "), '{"n": 3}'),
        (written(n="three"), '{"n": "three"}'),
        (written(z="None"), '{"z": null}'),
        (written(z="None of it"), '{"z": "None of it"}'),
        (written(other="1"), '{"other": "1"}'),
        (written(a="x") .replace("</function>", "<parameter=a>\ny\n</parameter>\n</function>"),
         '{"a": "x"}'),
        ("<tool_call>\n<function=f>\nnoise\n<parameter=n>\n1\n</parameter>\n</function>",
         '{"n": 1}'),
        ("<tool_call>\n<function=f>\n<parameter=a>\nx\n</para", '{"a": "x'),
        ("<tool_call>\n<function=f>\n<parameter=n>\n12", "{"),
    ],
)  # fmt: skip
def test_calls_are_parsed_although_tags_are_missing(text: str, arguments: str) -> None:
    assert parse(text) == ("", [("f", arguments)])


@pytest.mark.parametrize(
    "text", ["<function=unknown>", "a <function f>", "<tool_call>hello", "<tool_call>\n<function="]
)
def test_other_tags_are_content(text: str) -> None:
    content, calls = parse(text)
    assert not calls and (content == text or text.endswith("<function="))


def test_strings_of_a_nullable_type_go_out_as_they_come() -> None:
    parser = QWEN3_CODER.new_parser({"f": SCHEMA})
    parser.push("<tool_call>\n<function=f>\n<parameter=z>\n")
    assert parser.push("nul") == []
    assert [d.text for d in parser.push("l and")] == ['"z": "null and']  # type: ignore[union-attr]
    assert [d.text for d in parser.push(" void")] == [" void"]  # type: ignore[union-attr]
