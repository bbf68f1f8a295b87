"""What is wrong with a configuration: all of it, each with its place, and never a secret."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from protocol.errors import StartupError


class Origin(NamedTuple):
    """Where a value is from. ``rank``: later ones win."""

    rank: int
    text: str  # "default", "baton.yaml:12", "environment BATON_PORT", "flag --port"
    line: int = 0

    def __str__(self) -> str:
        return self.text


DEFAULT = Origin(0, "default")


def in_file(name: str, line: int) -> Origin:
    return Origin(1, f"{name}:{line}", line)


def in_environment(variable: str) -> Origin:
    return Origin(2, f"environment {variable}")


def by_flag(flag: str) -> Origin:
    return Origin(3, f"flag {flag}")


class Mistake(NamedTuple):
    """``key``: its path with dots; empty for what is about no key."""

    origin: Origin
    key: str
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.origin.text, self.key, self.text) if part)


class ConfigError(StartupError):
    """Every mistake of a configuration, in the order of the file, the environment, the flags."""

    def __init__(self, mistakes: Iterable[Mistake]) -> None:
        self.mistakes = sorted(set(mistakes), key=lambda m: (m.origin.rank, m.origin.line, m))
        lines = [f"  {mistake}" for mistake in self.mistakes]
        many = f"{len(lines)} mistakes" if len(lines) != 1 else "a mistake"
        super().__init__("\n".join([f"{many} in the configuration", *lines]))
