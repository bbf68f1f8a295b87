"""Validates a request body against its pydantic model and reports the first mistake.

A mistake is an ApiError (400) with the path of the field, what was expected, and what came. Sizes
are checked before pydantic walks through the body. A client may send an unsupported parameter of
OpenAI or vLLM with the value that changes nothing; any other value is refused by name, because
ignoring it would answer a different request. Unknown names are left out, and ``parse_open_body``
stores them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, PrivateAttr, ValidationError
from pydantic_core import ErrorDetails

from router.common.errors import ApiError, invalid
from router.openai.bodies.field_types import TAG_PREFIX, StrictModel, show_value
from router.openai.bodies.unknown_fields import unknown_names, unknown_parameter

MAX_FIELD_BYTES = 256 << 10
"""Most bytes of JSON in one parameter other than the prompt or the messages."""

_UNBOUNDED = {"prompt", "content", "messages", "input", "instructions"}
_SCHEMAS = {"tools", "response_format", "structured_outputs", "guided_json", "json_schema"}
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
NeutralValues = Mapping[str, tuple[Any, ...]]
"""Parameter name -> values at which it changes nothing; ``null`` is always one of them."""

_COMMON: NeutralValues = {
    "length_penalty": (1,),
    "bad_words": ([],),
    "input": (),
    "detokenize": (True,),
    "use_beam_search": (False,),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "stop_regex": ([],),
    "lora_path": (),
    "mirostat": (0,),
    "truncation_side": ("left",),
}
COMPLETION_UNSUPPORTED: NeutralValues = {
    **_COMMON,
    "suffix": ("",),
    "max_completion_tokens": (),
    "messages": (),
}
CHAT_UNSUPPORTED: NeutralValues = {
    **_COMMON,
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_WHY = {
    "chat_template": "the template is the operator's: it runs in the server",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "input": "prompts go to /v1/completions, chats to /v1/chat/completions or /v1/responses",
    "container": "this server runs no code",
    "max_completion_tokens": "completions have max_tokens",
    "mcp_servers": "this server calls no other one: send the tools of MCP servers as tools",
    "messages": "chats go to /v1/chat/completions",
    "prompt": "prompts go to /v1/completions",
}
Body = TypeVar("Body", bound=BaseModel)


class OpenBody(StrictModel):
    """Base class of whole bodies, whose unknown fields are ignored and named for the client."""

    model: str | None = None  # the one that is served

    _ignored: tuple[str, ...] = PrivateAttr(())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return names of unknown fields in the body that was sent."""
        return self._ignored


OpenBodyType = TypeVar("OpenBodyType", bound=OpenBody)


def parse_open_body(
    raw: Mapping[str, Any], model: type[OpenBodyType], neutral: NeutralValues
) -> OpenBodyType:
    """Return the checked body, as ``parse_body``, with the names of its unknown fields."""
    body = parse_body(raw, model, neutral)
    body._ignored = unknown_names(raw, model.model_fields.keys() | neutral.keys())
    return body


def parse_body(raw: Mapping[str, Any], model: type[Body], neutral: NeutralValues) -> Body:
    """Return the checked body. ``null`` means the default, as with OpenAI. ``neutral``: unsupported
    parameters, and the values at which they change nothing. Raises ApiError (400)."""
    given = {name: value for name, value in raw.items() if value is not None}
    check_unsupported(given, neutral)
    known = {name: value for name, value in given.items() if name in model.model_fields}
    check_sizes(known)
    try:
        return model.model_validate(known)
    except ValidationError as error:
        raise to_api_error(error, model) from None
    except RecursionError:
        raise invalid("the body is nested too deeply") from None


def to_api_error(error: ValidationError, model: type[BaseModel]) -> ApiError:
    """Return the first mistake that pydantic found."""
    first = error.errors(include_url=False)[0]
    field = field_path(first["loc"])
    kind = first["type"]
    if kind == "extra_forbidden":
        return _unknown_parameter(first["loc"], model)
    if kind == "baton_unknown":
        return _unknown_parameter((*first["loc"], first["ctx"]["name"]), model)
    if kind == "missing":
        return invalid(f"{field} is required", field, "missing_required_parameter")
    if kind == "baton":
        return _own_error(first, field)
    return invalid(f"{field} {describe_mistake(first)}", field)


def field_path(loc: tuple[int | str, ...]) -> str:
    """Return the path as a client writes it: ``messages[2].content``."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith(TAG_PREFIX):
            path += f".{part[:80]}"
    return path.removeprefix(".")[:200]


def _own_error(error: ErrorDetails, field: str) -> ApiError:
    context = error["ctx"]
    if "field" in context:
        return invalid(error["msg"], context["field"], context["code"])
    gap = "" if error["msg"].startswith("[") else " "
    message = f"{field}{gap}{error['msg']}{describe_tag(context, error['input'])}"
    return invalid(message, field, context["code"])


def _unknown_parameter(loc: tuple[int | str, ...], model: type[BaseModel]) -> ApiError:
    *above, name = loc
    return unknown_parameter(field_path(loc), str(name), _field_names(model, above))


def _field_names(model: type[BaseModel], above: list[int | str]) -> list[str]:
    """Return the names of the fields at that place; none where it is nested too deeply."""
    if not above:
        return list(model.model_fields)
    if len(above) > 1 or above[0] not in model.model_fields:
        return []
    nested = [
        kind
        for kind in _type_arguments(model.model_fields[str(above[0])].annotation)
        if isinstance(kind, type) and issubclass(kind, BaseModel)
    ]
    return [f.alias or name for kind in nested for name, f in kind.model_fields.items()]


def _type_arguments(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__args__", ()) or (annotation,)


def check_sizes(given: Mapping[str, Any]) -> None:
    """Raise ApiError (400) for the first parameter that is too large."""
    for field, value in given.items():
        if field not in _UNBOUNDED and _too_large(value):
            raise invalid(
                f"{field} must have at most {MAX_FIELD_BYTES} bytes of JSON",
                field,
                "schema_too_large" if field in _SCHEMAS else None,
            )


def _too_large(value: object) -> bool:
    """Return whether the JSON is too large. An entry takes a byte at least, which is checked
    first."""
    if not isinstance(value, str | list | dict):
        return False
    return len(value) > MAX_FIELD_BYTES or json_size(value) > MAX_FIELD_BYTES


def json_size(value: object) -> int:
    """Return the bytes of ``value`` in JSON; 0 for invalid Unicode, which other checks refuse."""
    try:
        return len(msgspec.json.encode(value))
    except UnicodeEncodeError:
        return 0


def describe_mistake(error: ErrorDetails) -> str:
    """Return what is wrong with a field: ``must be at most 2, not 3``."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind in _SIZES:
        return _size(*_SIZES[kind], context, value)
    if kind in _BOUNDS:
        word, name = _BOUNDS[kind]
        return f"must be {word} {_number(context[name])}, not {show_value(value)}"
    if kind == "string_pattern_mismatch":
        return f"must match {context['pattern']}, not {show_value(value)}"
    wanted = _KINDS.get(kind) or error["msg"].removeprefix("Input should be ")
    return f"must be {wanted}, not {show_value(value)}"


def describe_tag(context: Mapping[str, Any], value: Any) -> str:
    """Return what came instead of an object with a known ``context["tag"]``, to end a message."""
    tag = context.get("tag")
    if tag is None:
        return ""
    if not isinstance(value, dict):
        return f", not {show_value(value)}"
    return f", not {show_value(value[tag])}" if tag in value else f"; {tag} is missing"


def _size(word: str, bound: str, what: str, context: Mapping[str, Any], value: Any) -> str:
    limit = context[bound]
    if limit == 1 and not value:
        return "must not be empty"
    return f"must have {word} {limit} {what}, not {len(value)}"


def _number(bound: float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def check_unsupported(
    given: Mapping[str, Any], neutral: NeutralValues, why: Mapping[str, str] | None = None
) -> None:
    """Raise ApiError (400) for the first parameter with an unsupported value; ``why``: reasons by
    name, before those of all dialects."""
    reasons = {**_WHY, **(why or {})}
    for name, value in given.items():
        values = neutral.get(name)
        if values is None or any(_equal_in_json(value, wanted) for wanted in values):
            continue
        only = " or ".join(json.dumps(wanted) for wanted in (*values, None))
        reason = f" ({reasons[name]})" if name in reasons else ""
        raise invalid(
            f"{name} is not supported{reason}: leave it out, or send {only}",
            name,
            "unsupported_parameter",
        )


def _equal_in_json(value: Any, wanted: Any) -> bool:
    """Return whether the values are equal in JSON, where ``true`` is not 1."""
    return isinstance(value, bool) == isinstance(wanted, bool) and bool(value == wanted)
