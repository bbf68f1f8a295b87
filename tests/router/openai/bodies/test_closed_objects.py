"""Objects take declared keys only: which values a closed schema lets through."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from router.openai.bodies.closed_objects import close_objects
from router.openai.bodies.grammar_source import schema_source
from tests.router.openai.chat.toy import byte_level

TOKENIZER = byte_level()
MATCHING = LLTokenizer(TOKENIZER.to_str(), eos_token=TOKENIZER.token_to_id("</s>"))
A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}}
FREE: dict[str, Any] = {"type": "object"}


def fits(schema: dict[str, Any], value: Any) -> bool:
    options = {"whitespace_flexible": False, "lenient": True, "coerce_one_of": True}
    matcher = LLMatcher(MATCHING, schema_source(schema, "f", options).grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZER.encode(json.dumps(value, separators=(",", ":"))).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (A, [{}, {"a": 1}], [{"a": 1, "x": 2}, {"x": 2}]),
        (FREE, [{}, {"x": {"y": 1}}], [[]]),
        ({"type": "object", "properties": {}}, [{}], [{"x": 1}]),
        ({**A, "additionalProperties": True}, [{"a": 1, "x": 2}], [{"a": "1"}]),
        ({**A, "additionalProperties": {"type": "null"}}, [{"a": 1, "x": None}], [{"x": 1}]),
        ({**A, "required": ["z"]}, [{"a": 1, "z": []}], [{"a": 1}, {"z": 1, "x": 1}]),
        ({"type": "array", "items": A}, [[{"a": 1}]], [[{"x": 1}]]),
        ({**A, "properties": {"o": FREE}}, [{"o": {"x": 1}}], [{"x": 1}]),
        ({"anyOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {"x": 1}]),
        ({"allOf": [A, B]}, [{"a": 1, "b": 1}], [{"a": 1, "x": 1}]),
        ({**A, "anyOf": [{"required": ["a"]}]}, [{"a": 1}], [{"a": 1, "x": 1}]),
        ({**A, "anyOf": [B, {"type": "object", "required": ["a"]}]}, [{"a": 1, "b": 1}],
         [{"a": 1, "x": 1}]),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, [{"a": 1}], [{"x": 1}]),
        ({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": A}}, [{"a": 1}], [{"x": 1}]),
        ({"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}}, [{"a": 1, "b": 2}],
         [{"a": 1, "x": 2}]),
        ({"$ref": "#/$defs/N", "$defs": {"N": {"type": "object", "properties": {
            "n": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}}}}},
         [{"n": {"n": None}}], [{"n": {"x": None}}]),
    ],
)  # fmt: skip
def test_what_a_closed_schema_lets_through(
    schema: dict[str, Any], good: list[Any], bad: list[Any]
) -> None:
    assert [fits(schema, value) for value in good] == [True] * len(good)
    assert [fits(schema, value) for value in bad] == [False] * len(bad)


@pytest.mark.parametrize(
    "schema",
    [{}, {"properties": 3}, {"properties": {"a": True}, "allOf": 1}, {"allOf": [1, {"$ref": 3}]},
     {"$ref": "#", "properties": {"a": {"$ref": "#"}}}, {"required": 1, "properties": {"a": 1}}],
)  # fmt: skip
def test_any_schema_is_closed_without_an_error(schema: dict[str, Any]) -> None:
    before = json.dumps(schema)
    closed = close_objects(schema)
    assert json.dumps(schema) == before  # it is a copy
    assert close_objects(closed) == closed


def test_data_that_looks_like_a_schema_stays() -> None:
    schema = {"type": "object", "properties": {"a": {"const": A, "default": A, "enum": [A]}}}
    assert close_objects(schema)["properties"] == schema["properties"]


def test_many_references_take_linear_time() -> None:
    defs = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, A]} for i in range(3000)}
    assert close_objects({"$ref": "#/$defs/d0", "$defs": defs})
