"""Formats that clients ask for: what an output may be then, and what cannot be asked for."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import TypeAdapter, ValidationError

from router.common.errors import ApiError
from router.openai.bodies.output_formats import ResponseFormat, StructuredOutputs
from router.openai.chat.grammar_checker import GrammarChecker
from router.openai.chat.output_plan import OutputPlan, OutputPlanner
from router.openai.tool_calls.added_tokens import AddedTokenVocabulary
from tests.router.openai.chat.toy import byte_level

TOKENIZER = byte_level()
MATCHING = LLTokenizer(TOKENIZER.to_str(), eos_token=TOKENIZER.token_to_id("</s>"))
FORMAT = TypeAdapter(ResponseFormat)
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}

OPEN_POINT = {"type": "object", "properties": {"x": {"type": "integer"}}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    TOKENIZER.save(str(path))
    return path


@pytest.fixture(scope="module")
def checker(saved: Path) -> Iterator[GrammarChecker]:
    checker = GrammarChecker(saved)
    yield checker
    checker.close()


def fits(grammar: str, text: str) -> bool:
    matcher = LLMatcher(MATCHING, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZER.encode(text).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def planned(form: Any = None, structured: Any = None) -> OutputPlan:
    return OutputPlanner(AddedTokenVocabulary.of(TOKENIZER)).plan(
        response_format=None if form is None else FORMAT.validate_python(form),
        structured=None if structured is None else StructuredOutputs.model_validate(structured),
    )


def schema(value: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": value, **more}}


@pytest.mark.parametrize("form", [None, {"type": "text"}])
def test_any_text_needs_no_grammar(form: Any) -> None:
    assert planned(form) == OutputPlan()


@pytest.mark.parametrize(
    ("form", "structured", "good", "bad"),
    [
        ({"type": "json_object"}, None, '{"a":[1,{}]}', "[1]"),
        ({"type": "json_object"}, None, "{}", '{"a": 1}'),
        ({"type": "json_object", "schema": {}}, None, '{"b":1}', "[1]"),
        ({"type": "json_object", "schema": None}, None, '{"b":1}', "[1]"),
        ({"type": "json_object", "schema": POINT}, None, '{"x":1,"y":-2}', '{"x":1}'),
        (schema(OPEN_POINT), None, '{"x":1}', '{"x":1,"z":2}'),
        (None, {"json": OPEN_POINT}, '{"x":1}', '{"x":1,"z":2}'),
        (schema({**OPEN_POINT, "additionalProperties": True}), None, '{"x":1,"z":2}', '{"x":""}'),
        (schema(POINT, strict=True), None, '{"x":1,"y":-2}', '{"x":1}'),
        (schema({"enum": ["a", 1]}, description="d"), None, '"a"', '"b"'),
        (schema({"x-guidance": {"whitespace_flexible": True}}), None, "[1]", "[1 ]"),
        (None, {"json": POINT}, '{"x":1,"y":-2}', "{}"),
        (None, {"json": json.dumps(POINT)}, '{"x":1,"y":-2}', "{}"),
        (None, {"json_object": True}, "{}", "1"),
        (None, {"regex": "[0-9]{3}"}, "123", "12a"),
        (None, {"choice": ["yes", 'n"o\n']}, 'n"o\n', "yesn"),
        (None, {"grammar": 'start: "a" b\nb: /[0-9]+/'}, "a12", "b"),
        (None, {"grammar": 'root ::= "a" [0-9]+'}, "a12", "b"),
    ],
)
def test_an_output_fits_its_format(
    checker: GrammarChecker, form: Any, structured: Any, good: str, bad: str
) -> None:
    plan = planned(form, structured)
    plan = asyncio.run(checker.check(plan))
    assert fits(plan.grammar, good)
    assert not fits(plan.grammar, bad)
    assert plan.new_parser() is None


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"type": "object", "not": {"type": "string"}}, '"not"'),
        ({"if": {}, "then": {}}, '"if", "then"'),
        ({"type": "array", "uniqueItems": True}, '"uniqueItems"'),
        ({"type": "foo"}, "foo"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"type": "string", "format": "phone"}, "phone"),
        ({"$ref": "https://example.com/s"}, "example.com"),
        ({"$ref": "#/$defs/a"}, "/$defs/a"),
        ({"allOf": [{"type": "string"}, {"type": "number"}]}, "Unsatisfiable"),
        ({"oneOf": [{"type": "string"}, {"minLength": 3}]}, "oneOf"),
    ],
)
def test_what_no_grammar_holds_is_refused_by_name(
    checker: GrammarChecker, value: dict[str, Any], why: str
) -> None:
    with pytest.raises(ApiError) as error:
        asyncio.run(checker.check(planned(schema(value))))
    assert error.value.status == 400
    assert error.value.param == "response_format.json_schema.schema"
    assert why in error.value.message and error.value.param in error.value.message


@pytest.mark.parametrize(
    "structured",
    [{"regex": "("}, {"grammar": "start: nothing"}, {"grammar": "root ::= ("}, {"json": "[1"}],
)
def test_what_is_no_grammar_is_refused(checker: GrammarChecker, structured: Any) -> None:
    with pytest.raises(ApiError) as error:
        asyncio.run(checker.check(planned(structured=structured)))
    assert (error.value.status, error.value.param) == (400, "structured_outputs")


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"items": value}
    return value


def test_schemas_are_bounded(checker: GrammarChecker) -> None:
    asyncio.run(checker.check(planned(schema(nested(60)))))
    wide = {"enum": ["x" * 1000] * 200}
    for value in (nested(65), nested(100_000), wide):
        with pytest.raises(ApiError, match=r"nested|characters") as error:
            planned(schema(value))
        assert error.value.code == "schema_too_large"


def test_a_grammar_is_checked_once(checker: GrammarChecker) -> None:
    plan = planned(schema({"enum": [f"value {i}" for i in range(5000)]}))

    async def seconds() -> float:
        start = time.perf_counter()
        await checker.check(plan)
        return time.perf_counter() - start

    first = asyncio.run(seconds())
    assert min(asyncio.run(seconds()) for _ in range(3)) < first / 10


def test_checks_have_a_deadline(saved: Path) -> None:
    checker = GrammarChecker(saved, max_seconds=0.001)
    with pytest.raises(ApiError) as error:
        asyncio.run(checker.check(planned(schema({"enum": [f"v{i}" for i in range(9000)]}))))
    assert error.value.status == 429 and error.value.headers["retry-after"] == "1"
    checker.close()


def test_one_format_only() -> None:
    with pytest.raises(ApiError, match="without response_format"):
        planned({"type": "json_object"}, {"regex": "a"})
    for structured in ({}, {"regex": "a", "choice": ["b"]}, {"json_object": False}):
        with pytest.raises(ValidationError, match="exactly one"):
            StructuredOutputs.model_validate(structured)


@pytest.mark.parametrize(
    "form",
    [3, {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_object", "schema": 1},
     {"type": "json_schema", "json_schema": {"name": "s"}},
     {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}},
     {"type": "json_schema", "json_schema": {"name": "s", "schema": True}}],
)  # fmt: skip
def test_formats_are_checked(form: Any) -> None:
    with pytest.raises(ValidationError):
        FORMAT.validate_python(form)


def test_older_names_of_a_format_are_told(checker: GrammarChecker) -> None:
    planner = OutputPlanner(AddedTokenVocabulary.of(TOKENIZER))
    plan = planner.plan(structured=StructuredOutputs(regex="("), field="guided_regex")
    with pytest.raises(ApiError) as error:
        asyncio.run(checker.check(plan))
    assert error.value.param == "guided_regex"
