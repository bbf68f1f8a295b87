"""Patterns of a schema's strings, written so that llguidance 1.9 lets nothing else through.

There a class that holds NUL, as ``[^"]`` does, takes an escaped quote or backslash of a JSON
string whether or not it is one of its characters. So negated classes are written without NUL.
"""

from __future__ import annotations

import re
from typing import Any

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
