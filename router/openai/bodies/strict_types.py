"""What the pydantic types of this package share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from router.openai.bodies.field_checks import bad, show

STRICT = ConfigDict(strict=True, extra="forbid", frozen=True)


class Strict(BaseModel):
    """An object of a request. One with more names than there are is refused for the first that is
    unknown: pydantic would make an error of each, which takes seconds for a large body."""

    model_config = STRICT

    @model_validator(mode="before")
    @classmethod
    def _no_crowd(cls, value: Any) -> Any:
        fields = cls.model_fields
        if isinstance(value, dict) and len(value) > len(fields):
            known = {field.alias or name for name, field in fields.items()}
            unknown = next(name for name in value if name not in known)
            raise PydanticCustomError("baton_unknown", "unknown", {"name": unknown})
        return value


NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)
"""Names of functions and of formats, as OpenAI has them."""

TAG = "="
"""The first character of the tags of unions, which are no part of a field's path."""


def one_of(names: Iterable[str]) -> str:
    """``'a', 'b' or 'c'``, for messages."""
    *first, last = [repr(name) for name in names]
    return f"{', '.join(first)} or {last}" if first else last


def _check_name(value: Any) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise bad(f"must be 1 to 64 letters, digits, '_' or '-', not {show(value)}")
    return value


FunctionName = Annotated[
    str,
    PlainValidator(_check_name),
    WithJsonSchema({"type": "string", "pattern": f"^{NAME.pattern}$"}),
]
