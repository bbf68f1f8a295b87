"""Text to content and tool calls, as it comes.

    FREE --trigger--> HEAD --name--> ARGUMENTS --"}"--> AFTER --> HEAD (next call) or FREE

However the text was cut, the pieces that come out join to the same content and the same calls. What
turns out to be no call, as from a model that no grammar held, is content.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from router.generation.choice_stream import overlap
from router.openai.chat.call_grammar import Syntax

# MERGED router.chat.marks
# Where calls begin, go on and end in a text: patterns of a syntax, and the end of an object.
#
# A pattern comes with another for texts that may still become a match, so that a parser knows
# when it
# has to wait.

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


_LETTERS = string.ascii_letters + string.digits


class Content(NamedTuple):
    text: str


class CallStart(NamedTuple):
    call: int  # its place among the calls
    id: str
    name: str


class CallArguments(NamedTuple):
    """A piece of the call's arguments, which are JSON in the end."""

    call: int
    text: str


Delta = Content | CallStart | CallArguments


def new_call_id(syntax: Syntax) -> str:
    """Random, as long as the model's template takes it."""
    if syntax.short_ids:
        return "".join(secrets.choice(_LETTERS) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


class ToolParser:
    """Of one choice of one request."""

    def __init__(self, syntax: Syntax) -> None:
        self._syntax = syntax
        self._trigger = syntax.trigger
        self._patterns = patterns(syntax)
        self._state = self._start if not syntax.trigger else self._free
        self._text = ""  # not yet decided on
        self._blank = ""  # white space before anything else, which calls make go away
        self._spoken = False  # content other than white space has gone out
        self._out: list[Delta] = []
        self._ended = False
        self._json = JsonObject()
        self._calls = 0

    @property
    def called(self) -> bool:
        """Whether a call has begun."""
        return self._calls > 0

    def push(self, text: str) -> list[Delta]:
        """What ``text`` completes."""
        self._text += text
        while self._text and self._state():
            pass
        out, self._out = self._out, []
        return out

    def flush(self) -> list[Delta]:
        """What was held back, when no more text will come."""
        self._ended = True
        out = self.push("")
        if self._blank and not self.called:
            out.append(Content(self._blank))
        return out

    # ---- states: each looks at the text, and says whether to go on -----------------------------

    def _start(self) -> bool:
        """A syntax without a trigger: the whole text is calls, or none."""
        return self._head(otherwise=self._rest)

    def _rest(self) -> bool:
        self._state = self._rest
        self._content(len(self._text))
        return False

    def _free(self) -> bool:
        at = self._text.find(self._trigger)
        if at >= 0:
            self._content(at)
            self._state = self._called_for
            return True
        keep = 0 if self._ended else overlap(self._text, self._trigger)
        self._content(len(self._text) - keep)
        return False

    def _called_for(self) -> bool:
        return self._head(otherwise=self._no_call)

    def _no_call(self) -> bool:
        self._content(len(self._trigger))
        self._state = self._free
        return True

    def _head(self, otherwise: Callable[[], bool]) -> bool:
        found = self._patterns.first.full.match(self._text)
        if found:
            return self._begin(found)
        if not self._ended and self._patterns.first.partial.match(self._text):
            return False
        return otherwise()

    def _begin(self, found: re.Match[str]) -> bool:
        self._text = self._text[found.end() :]
        self._blank = ""
        self._out.append(CallStart(self._calls, new_call_id(self._syntax), found[1]))
        self._calls += 1
        self._json = JsonObject()
        self._state = self._arguments
        return True

    def _arguments(self) -> bool:
        size = self._json.scan(self._text)
        self._out.append(CallArguments(self._calls - 1, self._text[:size]))
        self._text = self._text[size:]
        if self._json.complete:
            self._state = self._after
        return True

    def _after(self) -> bool:
        found = self._patterns.next.full.match(self._text)
        if found:
            return self._begin(found)
        if not self._ended and self._patterns.next.partial.match(self._text):
            return False
        found = self._patterns.end.full.match(self._text)
        if not found and not self._ended and self._patterns.end.partial.match(self._text):
            return False
        self._text = self._text[found.end() if found else 0 :]
        self._state = self._free if self._trigger else self._rest
        return True

    def _content(self, size: int) -> None:
        """The first ``size`` characters are content; white space waits for something else."""
        text, self._text = self._blank + self._text[:size], self._text[size:]
        self._blank = ""
        if not text.strip() and not self._spoken:
            self._blank = text
        elif text:
            self._out.append(Content(text))
            self._spoken = True
