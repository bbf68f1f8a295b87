"""Mistakes of a configuration: where each one is and what is wrong, without any secret.

All modules of this package collect mistakes; ``ConfigError`` reports them together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from protocol.errors import StartupError


class ValueOrigin(NamedTuple):
    """The place that set a value. The place with the highest ``rank`` wins."""

    rank: int
    text: str  # "default", "baton.yaml:12", "environment BATON_PORT", "flag --port"
    line: int = 0

    def __str__(self) -> str:
        return self.text


DEFAULT_ORIGIN = ValueOrigin(0, "default")


def file_origin(name: str, line: int) -> ValueOrigin:
    return ValueOrigin(1, f"{name}:{line}", line)


def environment_origin(variable: str) -> ValueOrigin:
    return ValueOrigin(2, f"environment {variable}")


def flag_origin(flag: str) -> ValueOrigin:
    return ValueOrigin(3, f"flag {flag}")


class ConfigMistake(NamedTuple):
    """One mistake. ``key`` is a path with dots, or empty for a mistake that concerns no key."""

    origin: ValueOrigin
    key: str
    text: str

    def __str__(self) -> str:
        place = "" if self.origin == DEFAULT_ORIGIN else self.origin.text  # no place to look at
        return ": ".join(part for part in (place, self.key, self.text) if part)


class ConfigError(StartupError):
    """All mistakes of a configuration, in the order of file, environment and flags."""

    def __init__(self, mistakes: Iterable[ConfigMistake]) -> None:
        self.mistakes = sorted(set(mistakes), key=lambda m: (m.origin.rank, m.origin.line, m))
        lines = [f"  {mistake}" for mistake in self.mistakes]
        many = f"{len(lines)} mistakes" if len(lines) != 1 else "a mistake"
        super().__init__("\n".join([f"{many} in the configuration", *lines]))
