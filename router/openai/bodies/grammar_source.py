"""Grammars made of single fields of a request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from llguidance import LLMatcher

from router.common.errors import invalid

# MERGED router.chat.patterns
# Patterns of a schema's strings, written so that llguidance 1.9 lets nothing else through.
#
# There a class that holds NUL, as ``[^"]`` does, takes an escaped quote or backslash of a JSON
# string whether or not it is one of its characters. So negated classes are written without NUL.

_MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keywords of names, each with a schema."""

_DATA = {"const", "enum", "default", "examples"}
"""Keywords of values, which may look like schemas."""

_PARTS = re.compile(r"\\.|\[\^|\[(?:\\.|[^\]\\])*+\]?", re.DOTALL)
"""Of a pattern: an escape, the start of a negated class, another class (to the end where it
is not closed, and never twice over the same: hostile ones take no time either)."""


def tightened(schema: Any) -> Any:
    """A copy of a schema, or of a list of them. An instance of it is one of the schema."""
    if isinstance(schema, list):
        return [tightened(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _keyword(key, value) for key, value in schema.items()}


def without_nul(pattern: str) -> str:
    """The same, but that its negated classes do not hold NUL."""
    return _PARTS.sub(lambda part: r"[^\x00" if part[0] == "[^" else part[0], pattern)


def _keyword(key: str, value: Any) -> Any:
    if key == "pattern" and isinstance(value, str):
        return without_nul(value)
    if key in _MAPS and isinstance(value, dict):
        of_names = key == "patternProperties"
        return {without_nul(n) if of_names else n: tightened(s) for n, s in value.items()}
    return value if key in _DATA else tightened(value)


MAX_DEPTH = 64
"""Of objects and arrays in a schema, in each other."""

MAX_SCHEMA_CHARS = 128 << 10

COMPACT = {"whitespace_flexible": False}


class Source(NamedTuple):
    """A grammar that was made of a field of the request. ``lark``: the same as an expression of
    Lark's, where it can be part of a larger grammar. ``raw``: as the client wrote it, in Lark's
    notation or GBNF; a check of the plan brings what engines take."""

    field: str
    grammar: str
    lark: str | None = None
    raw: bool = False


def schema_source(
    schema: Mapping[str, Any], field: str, options: Mapping[str, Any] = COMPACT
) -> Source:
    """A JSON schema under ``options`` (llguidance's). Raises ApiError (400) for one too large."""
    if deeper_than(schema, MAX_DEPTH):
        raise invalid(f"{field} must be nested at most {MAX_DEPTH} deep", field, "schema_too_large")
    size = len(_text(schema))
    if size > MAX_SCHEMA_CHARS:
        raise invalid(
            f"{field} must have at most {MAX_SCHEMA_CHARS} characters, not {size}",
            field,
            "schema_too_large",
        )
    guided = {**tightened(schema), "x-guidance": dict(options)}
    text = _text(guided)
    return Source(field, LLMatcher.grammar_from_json_schema(guided), f"%json {text}")


def _text(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, separators=(",", ":"))


def deeper_than(value: Any, limit: int) -> bool:
    """Whether objects and arrays are nested more than ``limit`` deep."""
    level = [value]
    for _ in range(limit):
        inner = [v for v in level if isinstance(v, dict | list)]
        level = [i for v in inner for i in (v.values() if isinstance(v, dict) else v)]
        if not level:
            return False
    return any(isinstance(v, dict | list) for v in level)


def quoted(text: str) -> str:
    """A text as a literal of Lark's."""
    return json.dumps(text)
