"""Gemma's notation: values by the tool's schema, in the grammar and in the parser."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from router.common.errors import ApiError
from router.openai.chat.output_plan import OutputPlan, OutputPlanner
from router.openai.tool_calls.added_tokens import AddedTokenVocabulary
from router.openai.tool_calls.families.gemma import GEMMA4
from tests.router.openai.chat.weather import VOCABS, checked, parsed, wish
from tests.router.openai.tool_calls.writing import Calls, run, written

EVERY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "first": {"type": "string", "maxLength": 4},
        "unit": {"enum": ["C", 1, None]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "exact": {"type": "boolean"},
        "tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}]},
        "list": {"type": "array", "items": {"type": "string", "maxLength": 2}, "minItems": 1,
                 "maxItems": 2},
        "last": {"type": "number"},
    },
    "required": ["unit", "last"],
    "$defs": {"Tree": {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/Tree"}, "leaf": {"type": "integer"}},
        "required": ["leaf"],
    }},
}  # fmt: skip


def planned(parameters: dict[str, Any], vocab: str = "letters") -> OutputPlan:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    vocabulary = AddedTokenVocabulary.of(VOCABS[vocab].tokenizer)
    plan = OutputPlanner(vocabulary, GEMMA4).plan(wish("required", tools=[tool]))
    return checked(VOCABS[vocab].tokenizer, plan)


@pytest.mark.parametrize("vocab", VOCABS)
def test_values_fit_their_schema(vocab: str) -> None:
    grammar = planned(EVERY, vocab).grammar
    base = {"unit": "C", "last": 1.5}
    good = [base, {"first": "", **base}, {"unit": None, "list": ["a", "b"], "last": 0}]
    good += [{"unit": 1, "tree": {"tree": {"leaf": 1}, "leaf": 2}, "last": 1}]
    good += [{"first": "a", "unit": 1, "days": 9, "exact": True, "tree": None, "last": -1}]
    bad = [{"unit": "C"}, {"last": 1}, {"unit": "K", "last": 1}, {"first": "abcde", **base}]
    bad += [{"unit": 1, "list": [], "last": 1}, {"unit": 1, "list": ["a"] * 3, "last": 1}]
    bad += [{"unit": 1, "tree": {}, "last": 1}, {**base, "other": 1}, {"unit": 1, "last": "1"}]
    bad += [{"unit": 1, "days": 0, "last": 1}, {"unit": 1, "tree": {"leaf": 1, "x": 1}, "last": 1}]
    fits = VOCABS[vocab].fits
    texts = [[written(GEMMA4, ("f", json.dumps(one))) for one in ones] for ones in (good, bad)]
    assert [fits(grammar, text) for text in texts[0]] == [True] * len(good)
    assert [fits(grammar, text) for text in texts[1]] == [False] * len(bad)


@pytest.mark.parametrize("vocab", VOCABS)
def test_what_the_grammar_lets_through_fits_the_schema(vocab: str) -> None:
    plan = planned(EVERY, vocab)
    for seed in range(8):
        [(name, given), *_] = parsed(plan, VOCABS[vocab].walk(plan.grammar, random.Random(seed)))[1]
        assert name == "f"
        jsonschema.validate(json.loads(given), EVERY)


def test_free_objects_and_values_of_any_type() -> None:
    grammar = planned({"properties": {"a": {}, "o": {"type": "object"}}}).grammar
    for value in (1, "x", [1, {"b": None}], {"k": True}):
        text = written(GEMMA4, ("f", json.dumps({"a": value, "o": {"k": value}})))
        assert VOCABS["letters"].fits(grammar, text)


def test_a_key_that_the_notation_cannot_hold_is_refused() -> None:
    with pytest.raises(ApiError, match="cannot name a property 'a:b'") as error:
        planned({"properties": {"a:b": {}}})
    assert error.value.param == "tools[0].function.parameters"


SCHEMA = {"properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "l": {
    "type": "array", "items": {"type": "number"}}}}  # fmt: skip


def parse(text: str) -> tuple[str, Calls]:
    return run(GEMMA4.new_parser({"f": SCHEMA}), list(text))


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("call:f{}<tool_call|>", "{}"),
        (":f{n:1}<tool_call|>", '{"n": 1}'),
        ('call:f{a:<|"|>x: {y}, "z"<|"|>,n:2}<tool_call|>', '{"a": "x: {y}, \\"z\\"", "n": 2}'),
        ("call:f{a:12,n:3}", '{"a": "12", "n": 3}'),
        ('call:f{n:<|"|>3<|"|>,l:[<|"|>1<|"|>,2]}', '{"n": 3, "l": [1, 2]}'),
        ("call:f{n:1,n:{b:[2]},a:yes}", '{"n": 1, "a": "yes"}'),
        ('call:f{<|"|>n<|"|>:1, b: true , c:null,d:None}',
         '{"n": 1, "b": true, "c": null, "d": null}'),
        ("call:f{n:,a:}", '{"n": null, "a": null}'),
        ("call:f{n:1<tool_call|>", '{"n": 1}'),
        ("call:f{o:{p:[1,[2]]", '{"o": {"p": [1, [2]]'),
        ('call:f{a:<|"|>x<|"', '{"a": "x'),
    ],
)  # fmt: skip
def test_calls_are_parsed(text: str, arguments: str) -> None:
    assert parse("<|tool_call>" + text) == ("", [("f", arguments)])


def test_more_than_one_call() -> None:
    text = "I look.<|tool_call>call:f{n:1}<tool_call|><|tool_call>call:g{}<tool_call|>"
    assert parse(text) == ("I look.", [("f", '{"n": 1}'), ("g", "{}")])
