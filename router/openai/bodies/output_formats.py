"""Output formats of a request, converted to llguidance's grammars.

OpenAI's ``response_format``, and vLLM's ``structured_outputs`` with the older ``guided_*``. JSON is
generated without white space, unless the format asks for it, so that an output is as short as
possible.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from llguidance import LLMatcher
from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
    model_validator,
)

from router.common.errors import invalid
from router.openai.bodies.field_types import (
    FunctionName,
    StrictModel,
    field_error,
    list_alternatives,
    show_value,
)
from router.openai.bodies.grammar_source import GrammarSource, lark_literal, schema_source

MAX_FORMAT_CHOICES = 1024
MAX_GRAMMAR_CHARS = 16 << 10
"""Length of a regex, or of a grammar in Lark's notation or GBNF."""

ANY_OBJECT: dict[str, Any] = {"type": "object"}


class JsonSchema(StrictModel):
    """A JSON schema for the output. ``strict`` changes nothing: the schema is always enforced."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: FunctionName
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(StrictModel):
    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """Any JSON object; or, as llama.cpp takes it, JSON that fits a schema."""

    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class JsonSchemaFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


_FORMATS = ("text", "json_object", "json_schema")


def _format_tag(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"={kind}" if kind in _FORMATS else None


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("=text")]
    | Annotated[JsonObjectFormat, Tag("=json_object")]
    | Annotated[JsonSchemaFormat, Tag("=json_schema")],
    Discriminator(
        _format_tag,
        custom_error_type="baton",
        custom_error_message="{message}",
        custom_error_context={
            "message": f"must be an object with a type: {list_alternatives(_FORMATS)}",
            "code": "invalid_value",
            "tag": "type",
        },
    ),
]


def _check_json(value: Any) -> Any:
    if not isinstance(value, dict | str):
        raise field_error(f"must be a JSON schema, or one as a string, not {show_value(value)}")
    return value


JsonOrText = Annotated[
    dict[str, Any] | str,
    PlainValidator(_check_json),
    WithJsonSchema({"type": ["object", "string"]}),
]


class StructuredOutputs(StrictModel):
    """vLLM's constraints on an output: exactly one of them."""

    model_config = ConfigDict(serialize_by_alias=True)

    json_: JsonOrText | None = Field(None, alias="json")
    regex: str | None = Field(None, min_length=1, max_length=MAX_GRAMMAR_CHARS)
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(
        None, min_length=1, max_length=MAX_FORMAT_CHOICES
    )
    grammar: str | None = Field(None, min_length=1, max_length=MAX_GRAMMAR_CHARS)
    json_object: bool | None = None

    @model_validator(mode="after")
    def _only_one(self) -> StructuredOutputs:
        given = [self.json_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(value is not None for value in given) != 1:
            names = ("json", "regex", "choice", "grammar", "json_object")
            raise field_error(f"must have exactly one of {list_alternatives(names)}")
        return self


GUIDED_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}
"""vLLM's older fields and those of llama.cpp -> their names in ``structured_outputs``."""


def response_format_source(wanted: ResponseFormat) -> GrammarSource | None:
    """Return the grammar of a format; None where any text is allowed. Raises ApiError (400)."""
    if isinstance(wanted, TextFormat):
        return None
    if isinstance(wanted, JsonObjectFormat):
        if not wanted.schema_:
            return schema_source(ANY_OBJECT, "response_format")
        return schema_source(wanted.schema_, "response_format.schema")
    return schema_source(wanted.json_schema.schema_, "response_format.json_schema.schema")


def structured_outputs_source(
    wanted: StructuredOutputs, field: str = "structured_outputs"
) -> GrammarSource:
    """Return the grammar of ``wanted``, sent in ``field``. Raises ApiError (400)."""
    if wanted.json_ is not None:
        return schema_source(_object(wanted.json_, field), field)
    if wanted.json_object:
        return schema_source(ANY_OBJECT, field)
    if wanted.regex is not None:
        return GrammarSource(field, LLMatcher.grammar_from_regex(wanted.regex))
    if wanted.choice is not None:
        lark = "(" + " | ".join(lark_literal(choice) for choice in wanted.choice) + ")"
        return GrammarSource(field, LLMatcher.grammar_from_lark(f"start: {lark}"), lark)
    assert wanted.grammar is not None
    return GrammarSource(field, wanted.grammar, raw=True)


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _object(schema: dict[str, Any] | str, field: str) -> dict[str, Any]:
    if isinstance(schema, dict):
        return schema
    try:
        value = json.loads(schema, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{field} must hold a JSON schema: {error}", field) from None
    if not isinstance(value, dict):
        raise invalid(f"{field} must hold a JSON schema, which is an object", field)
    return value
