"""Where calls begin, go on and end in a text: patterns of a syntax, and the end of an object.

A pattern comes with another for texts that may still become a match, so that a parser knows when it
has to wait.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from router.chat.syntax import Syntax

_SPACE = r"\s{0,8}"  # bounded, so that one can say early that something is no call


class JsonObject:
    """Finds the end of an object, which begins with the first character."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.complete = False

    def scan(self, text: str) -> int:
        """How many characters of ``text`` belong to it."""
        for at, c in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = c == "\\"
                self._in_string = c != '"'
            elif c == '"':
                self._in_string = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.complete = True
                    return at + 1
        return len(text)


class Pattern(NamedTuple):
    full: re.Pattern[str]
    partial: re.Pattern[str]  # all of a text that may become a full one


class Patterns(NamedTuple):
    first: Pattern  # from the trigger to the arguments of the first call
    next: Pattern  # from the end of some arguments to those of the next call
    end: Pattern  # what follows the last arguments


@lru_cache(maxsize=16)
def patterns(syntax: Syntax) -> Patterns:
    """White space in a syntax's marks is as good as none, and the other way round."""
    head = [*_atoms(syntax.open), "([a-zA-Z0-9_-]{1,64})", *_atoms(syntax.middle), r"(?=\{)"]
    ready = [*head[:-1], _SPACE, head[-1]]
    close = _atoms(syntax.close)
    return Patterns(
        first=_pattern([*_atoms(syntax.begin), *ready]),
        next=_pattern([*close, *_atoms(syntax.between), *ready]),
        end=_pattern([*close, *_atoms(syntax.end)]),
    )


def _atoms(mark: str) -> list[str]:
    """A pattern for each character, and one for the white space in front of each word or sign."""
    tokens = re.findall(r"\w+|[^\w\s]", mark)
    return [atom for token in tokens for atom in (_SPACE, *map(re.escape, token))]


def _pattern(atoms: list[str]) -> Pattern:
    partial = ""
    for atom in reversed(atoms):
        partial = f"(?:{atom}{partial})?" if partial else f"(?:{atom})?"
    return Pattern(re.compile("".join(atoms)), re.compile(partial + r"\Z"))
