"""Grammars made of single fields of a request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from llguidance import LLMatcher

from router.chat.patterns import tightened
from router.errors import invalid

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
