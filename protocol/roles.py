"""The two roles of a worker."""

from __future__ import annotations

from typing import Literal, TypeAlias

from protocol.errors import StartupError

Role: TypeAlias = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")


def as_role(text: str) -> Role:
    """Raises StartupError for anything but the two roles."""
    if text == "prefill":
        return "prefill"
    if text == "decode":
        return "decode"
    raise StartupError(f"role must be 'prefill' or 'decode', not {text!r}")
