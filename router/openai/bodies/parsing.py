"""A body against its model. Reports the first mistake, with the path of its field."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from router.common.errors import ApiError, invalid
from router.openai.bodies.field_checks import show
from router.openai.bodies.strict_types import TAG
from router.openai.bodies.unsupported import Neutral, check_unsupported

# MERGED router.api.bounds
# Bounds on the parts of a body, looked at before anything walks through them.

MAX_FIELD = 256 << 10
"""Bytes of JSON of any parameter but the prompt, or the messages: all tools together, a format."""

_UNBOUNDED = {"prompt", "messages"}
_SCHEMAS = {"tools", "response_format", "structured_outputs", "guided_json"}


def check_sizes(given: Mapping[str, Any]) -> None:
    """Raises ApiError (400) for the first parameter that is too large."""
    for field, value in given.items():
        if field not in _UNBOUNDED and _too_large(value):
            raise invalid(
                f"{field} must have at most {MAX_FIELD} bytes of JSON",
                field,
                "schema_too_large" if field in _SCHEMAS else None,
            )


def _too_large(value: object) -> bool:
    """An entry is a byte at least: what is far too large need not be measured."""
    if not isinstance(value, str | list | dict):
        return False
    return len(value) > MAX_FIELD or json_size(value) > MAX_FIELD


def json_size(value: object) -> int:
    """Bytes that ``value`` takes in JSON; what is no text is left to others."""
    try:
        return len(msgspec.json.encode(value))
    except UnicodeEncodeError:
        return 0


# MERGED router.api.phrases
# What pydantic finds wrong with a value, in the words of JSON: what was expected, what came.

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


Body = TypeVar("Body", bound=BaseModel)

_ELSEWHERE = {
    "messages": "; chats go to /v1/chat/completions",
    "prompt": "; prompts go to /v1/completions",
    "input": "; prompts go to /v1/completions, chats to /v1/chat/completions",
}


def parse(raw: Mapping[str, Any], model: type[Body], neutral: Neutral) -> Body:
    """Raises ApiError (400). ``null`` means the default, as with OpenAI. ``neutral``: what is
    refused by name, and the values at which it changes nothing."""
    given = {name: value for name, value in raw.items() if value is not None}
    check_unsupported(given, neutral)
    known = {name: value for name, value in given.items() if name not in neutral}
    for name in known:
        if name not in model.model_fields:
            raise _unknown((name,), model)
    check_sizes(known)
    try:
        return model.model_validate(known)
    except ValidationError as error:
        raise translate(error, model) from None
    except RecursionError:
        raise invalid("the body is nested too deeply") from None


def translate(error: ValidationError, model: type[BaseModel]) -> ApiError:
    """The first mistake that pydantic found, in our words."""
    first = error.errors(include_url=False)[0]
    field = path_of(first["loc"])
    kind = first["type"]
    if kind == "extra_forbidden":
        return _unknown(first["loc"], model)
    if kind == "baton_unknown":
        return _unknown((*first["loc"], first["ctx"]["name"]), model)
    if kind == "missing":
        return invalid(f"{field} is required", field, "missing_required_parameter")
    if kind == "baton":
        return _own(first, field)
    return invalid(f"{field} {wrong(first)}", field)


def path_of(loc: tuple[int | str, ...]) -> str:
    """``messages[2].content``, as a client would write it."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith(TAG):
            path += f".{part[:80]}"
    return path.removeprefix(".")[:200]


def _own(error: ErrorDetails, field: str) -> ApiError:
    context = error["ctx"]
    if "field" in context:
        return invalid(error["msg"], context["field"], context["code"])
    gap = "" if error["msg"].startswith("[") else " "
    message = f"{field}{gap}{error['msg']}{tagged(context, error['input'])}"
    return invalid(message, field, context["code"])


def _unknown(loc: tuple[int | str, ...], model: type[BaseModel]) -> ApiError:
    *above, name = loc
    field = path_of(loc)
    names = _fields(model, above)
    near = difflib.get_close_matches(str(name)[:80], names, n=1)
    hint = _ELSEWHERE.get(field, f"; did you mean {near[0]!r}?" if near else "")
    return invalid(f"unknown parameter {field!r}{hint}", field, "unknown_parameter")


def _fields(model: type[BaseModel], above: list[int | str]) -> list[str]:
    """Names of the fields at that place; none where it is too deep to tell."""
    if not above:
        return list(model.model_fields)
    if len(above) > 1 or above[0] not in model.model_fields:
        return []
    nested = [
        kind
        for kind in _arguments(model.model_fields[str(above[0])].annotation)
        if isinstance(kind, type) and issubclass(kind, BaseModel)
    ]
    return [f.alias or name for kind in nested for name, f in kind.model_fields.items()]


def _arguments(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__args__", ()) or (annotation,)
