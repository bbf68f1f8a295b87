"""Bounds on the parts of a body, looked at before anything walks through them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from router.errors import invalid

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
