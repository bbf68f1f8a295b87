"""What pydantic finds wrong with a value, in the words of JSON: what was expected, what came."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import ErrorDetails

from router.api.checks import show

_KINDS = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "an array",
    "tuple_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
}
_SIZES = {
    "too_short": ("at least", "min_length", "entries"),
    "too_long": ("at most", "max_length", "entries"),
    "string_too_short": ("at least", "min_length", "characters"),
    "string_too_long": ("at most", "max_length", "characters"),
}


def wrong(error: ErrorDetails) -> str:
    """``must be at most 2, not 3``: what is to be said of the field."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind in _SIZES:
        return _size(*_SIZES[kind], context, value)
    if kind in _BOUNDS:
        word, name = _BOUNDS[kind]
        return f"must be {word} {_number(context[name])}, not {show(value)}"
    if kind == "string_pattern_mismatch":
        return f"must match {context['pattern']}, not {show(value)}"
    wanted = _KINDS.get(kind) or error["msg"].removeprefix("Input should be ")
    return f"must be {wanted}, not {show(value)}"


def tagged(context: Mapping[str, Any], value: Any) -> str:
    """What came in place of an object with a known ``context["tag"]``, to be added to a message."""
    tag = context.get("tag")
    if tag is None:
        return ""
    if not isinstance(value, dict):
        return f", not {show(value)}"
    return f", not {show(value[tag])}" if tag in value else f"; {tag} is missing"


def _size(word: str, bound: str, what: str, context: Mapping[str, Any], value: Any) -> str:
    limit = context[bound]
    if limit == 1 and not value:
        return "must not be empty"
    return f"must have {word} {limit} {what}, not {len(value)}"


def _number(bound: float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)
