"""What a check has found."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Level: TypeAlias = Literal["ok", "note", "problem"]
"""ok: as it should be; note: works, but worth knowing; problem: a start would fail."""


class Finding(msgspec.Struct, frozen=True):
    """One line of the report. ``remedy``: what to do about it, where there is anything to do."""

    check: str
    level: Level
    text: str
    remedy: str = ""


def ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def note(check: str, text: str, remedy: str = "") -> Finding:
    return Finding(check, "note", text, remedy)


def problem(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, "problem", text, remedy)


def problems(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level == "problem"]
