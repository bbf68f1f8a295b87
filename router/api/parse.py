"""A body against its model. Reports the first mistake, with the path of its field."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from router.api.bounds import check_sizes
from router.api.phrases import tagged, wrong
from router.api.unsupported import Neutral, check_unsupported
from router.chat.fields import TAG
from router.errors import ApiError, invalid

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
