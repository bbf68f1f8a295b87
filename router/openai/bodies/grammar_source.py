"""Converts fields of a request into grammars for llguidance.

The strings of a JSON schema get patterns that llguidance 1.9 enforces exactly: there a class that
contains NUL, as ``[^"]`` does, accepts an escaped quote or backslash of a JSON string whether or
not it is one of its characters. So negated classes are rewritten to exclude NUL (``exclude_nul``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from llguidance import LLMatcher

from router.common.errors import invalid
from router.openai.bodies.closed_objects import close_objects

MAX_DEPTH = 64
"""Nesting of objects and arrays in a schema."""

MAX_SCHEMA_CHARS = 128 << 10

COMPACT = {"whitespace_flexible": False}

_NAMED_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keywords whose value maps names to schemas."""

_DATA_KEYWORDS = {"const", "enum", "default", "examples"}
"""Keywords whose value is data, which may look like a schema."""

_PATTERN_PARTS = re.compile(r"\\.|\[\^|\[(?:\\.|[^\]\\])*+\]?", re.DOTALL)
"""Parts of a pattern: an escape, the start of a negated class, or another class (to the end if it
is not closed). Matching does not backtrack, so hostile patterns take linear time, too."""


class GrammarSource(NamedTuple):
    """A grammar made from a field of the request. ``lark``: the same as a Lark expression, where it
    can be part of a larger grammar. ``raw``: as the client wrote it, in Lark's notation or GBNF;
    ``GrammarChecker`` converts it for the engines."""

    field: str
    grammar: str
    lark: str | None = None
    raw: bool = False


def schema_source(
    schema: Mapping[str, Any], field: str, options: Mapping[str, Any] = COMPACT
) -> GrammarSource:
    """Return the grammar of a JSON schema under llguidance's ``options``. Raises ApiError (400)."""
    if is_deeper_than(schema, MAX_DEPTH):
        raise invalid(f"{field} must be nested at most {MAX_DEPTH} deep", field, "schema_too_large")
    size = len(_text(schema))
    if size > MAX_SCHEMA_CHARS:
        raise invalid(
            f"{field} must have at most {MAX_SCHEMA_CHARS} characters, not {size}",
            field,
            "schema_too_large",
        )
    closed = close_objects(schema)
    guided = {**exclude_nul(closed), "x-guidance": dict(options)}
    try:
        grammar = LLMatcher.grammar_from_json_schema(guided)
    except ValueError:  # it takes integers of 64 bits and valid Unicode
        message = f"{field} must not hold integers beyond 64 bits or half of a surrogate pair"
        raise invalid(message, field, "invalid_schema") from None
    return GrammarSource(field, grammar, schema_lark(closed, options))


def schema_lark(schema: Mapping[str, Any], options: Mapping[str, Any] = COMPACT) -> str:
    """Return Lark for JSON that fits a checked schema."""
    return f"%json {_text({**exclude_nul(schema), 'x-guidance': dict(options)})}"


def _text(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, separators=(",", ":"))


def is_deeper_than(value: Any, limit: int) -> bool:
    """Return whether objects and arrays are nested more than ``limit`` deep."""
    level = [value]
    for _ in range(limit):
        inner = [v for v in level if isinstance(v, dict | list)]
        level = [i for v in inner for i in (v.values() if isinstance(v, dict) else v)]
        if not level:
            return False
    return any(isinstance(v, dict | list) for v in level)


def lark_literal(text: str) -> str:
    """Return ``text`` as a Lark literal."""
    return json.dumps(text)


def exclude_nul(schema: Any) -> Any:
    """Return a copy of a schema, or of a list of them, whose patterns exclude NUL."""
    if isinstance(schema, list):
        return [exclude_nul(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _keyword(key, value) for key, value in schema.items()}


def without_nul(pattern: str) -> str:
    """Return the pattern with NUL excluded from its negated classes."""
    return _PATTERN_PARTS.sub(lambda part: r"[^\x00" if part[0] == "[^" else part[0], pattern)


def _keyword(key: str, value: Any) -> Any:
    if key == "pattern" and isinstance(value, str):
        return without_nul(value)
    if key in _NAMED_SCHEMAS and isinstance(value, dict):
        are_patterns = key == "patternProperties"
        return {without_nul(n) if are_patterns else n: exclude_nul(s) for n, s in value.items()}
    return value if key in _DATA_KEYWORDS else exclude_nul(value)
