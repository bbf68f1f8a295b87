"""What the pydantic types of this package share: errors that stand as they are, and places."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

STRICT = ConfigDict(strict=True, extra="forbid", frozen=True)

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)
"""Names of functions and of formats, as OpenAI has them."""

TAG = "="
"""The first character of the tags of unions, which are no part of a field's path."""


def bad(message: str, code: str | None = None) -> PydanticCustomError:
    """An error whose message stands as it is. Braces would be read as a template otherwise."""
    return PydanticCustomError("baton", "{message}", {"message": message, "code": code})


def field_path(place: Sequence[str | int]) -> str:
    """``("messages", 2, "=user", "content")`` to ``messages[2].content``."""
    path = ""
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith(TAG):
            path += f".{part}" if path else part
    return path


def one_of(names: Iterable[str]) -> str:
    """``'a', 'b' or 'c'``, for messages."""
    *first, last = [repr(name) for name in names]
    return f"{', '.join(first)} or {last}" if first else last


def check_name(value: Any) -> str:
    """A name of at most 64 letters, digits, ``_`` and ``-``."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise bad(f"must be 1 to 64 letters, digits, '_' or '-', not {show(value)}")
    return value


def show(value: object) -> str:
    """A value in a message: short, whatever it is."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


FunctionName = Annotated[
    str,
    PlainValidator(check_name),
    WithJsonSchema({"type": "string", "pattern": f"^{NAME.pattern}$"}),
]
