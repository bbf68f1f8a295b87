"""Casts the text of an argument to JSON of the types that its schema allows.

The order of the types is that of vLLM's ``coerce_to_schema_type``: null, integer, number, boolean,
object, array, string. A text that fits none of them becomes a string, so that the result is always
JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import NoReturn

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_BOOLEANS = {"true": "true", "1": "true", "false": "false", "0": "false"}
_NULLS = ("null", "none")  # some templates show Python's None
_CONTAINERS = {"{": "object", "[": "array"}


def cast_text(text: str, types: Collection[str]) -> str:
    """Return JSON for ``text``; ``types``: what its schema allows, empty for any."""
    bare = text.strip()
    lower = bare.lower() if len(bare) < 6 else ""
    if "null" in types and lower in _NULLS:
        return "null"
    if "integer" in types and _INTEGER.fullmatch(bare):
        return bare
    if {"number", "integer"} & set(types) and _NUMBER.fullmatch(bare):
        return bare
    if "boolean" in types and lower in _BOOLEANS:
        return _BOOLEANS[lower]
    if _CONTAINERS.get(bare[:1]) in types and is_json(bare):
        return bare
    if "string" not in types and is_json(bare):
        return bare
    return json.dumps(text, ensure_ascii=False)


def json_string_piece(text: str) -> str:
    """Return a piece of a string as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_json(text: str) -> bool:
    """Return whether ``text`` is a JSON value."""
    try:
        json.loads(text, parse_constant=_refuse, parse_int=_keep, parse_float=_keep)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _keep(digits: str) -> str:
    """Numbers stay text: Python refuses integers of more than some thousand digits."""
    return digits
