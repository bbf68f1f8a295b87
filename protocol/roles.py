"""The two roles of a worker, and the check of a role that comes as text."""

from __future__ import annotations

from typing import Literal, TypeAlias

from protocol.errors import UsageError

Role: TypeAlias = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")


def parse_role(text: str) -> Role:
    """Return ``text`` as a role. Raises StartupError for any other text."""
    if text == "prefill":
        return "prefill"
    if text == "decode":
        return "decode"
    raise UsageError(f"role must be 'prefill' or 'decode', not {text!r}")
