"""What sections and keys of the configuration are made with."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

FLAG = "x-flag"
NO_FLAG = ""


def key(default: object, text: str, flag: str | None = None, **bounds: Any) -> Any:
    """A field with its help ``text``. ``flag``: None for the field's name."""
    extra: dict[str, Any] | None = None if flag is None else {FLAG: flag}
    return Field(default, description=text, json_schema_extra=extra, **bounds)


def section(text: str, kind: type[BaseModel]) -> Any:
    return Field(default_factory=kind, description=text)


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False
    )
