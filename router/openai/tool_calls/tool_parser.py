"""Splits a model's text into content and tool calls while it is generated.

    FREE --trigger--> HEAD --name--> ARGUMENTS --"}"--> AFTER --> HEAD (next call) or FREE

The result does not depend on how the text is cut: the pieces join to the same content and calls.
Text that turns out not to be a call, as from a model without a grammar, is content.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from router.openai.tool_calls.tool_syntax import ToolCallSyntax

_LETTERS = string.ascii_letters + string.digits
_SPACE = r"\s{0,8}"  # bounded, so that text that is not a call is recognised early


class ContentDelta(NamedTuple):
    text: str


class CallStart(NamedTuple):
    call: int  # index among the calls
    id: str
    name: str


class CallArgumentsDelta(NamedTuple):
    """A piece of a call's arguments; the pieces join to JSON."""

    call: int
    text: str


ParsedDelta = ContentDelta | CallStart | CallArgumentsDelta


class ToolParser:
    """The parser of one choice: ``push`` for each text, then ``flush``."""

    def __init__(self, syntax: ToolCallSyntax) -> None:
        self._syntax = syntax
        self._trigger = syntax.trigger
        self._patterns = syntax_patterns(syntax)
        self._state = self._start if not syntax.trigger else self._free
        self._text = ""  # not yet classified
        self._blank = ""  # leading white space, dropped if calls follow
        self._has_content = False  # other than white space
        self._out: list[ParsedDelta] = []
        self._ended = False
        self._json = JsonObjectScanner()
        self._calls = 0

    @property
    def called(self) -> bool:
        """Return whether a call has begun."""
        return self._calls > 0

    def push(self, text: str) -> list[ParsedDelta]:
        """Return the deltas that ``text`` completes."""
        self._text += text
        while self._text and self._state():
            pass
        out, self._out = self._out, []
        return out

    def flush(self) -> list[ParsedDelta]:
        """Return the rest when no more text will come."""
        self._ended = True
        out = self.push("")
        if self._blank and not self.called:
            out.append(ContentDelta(self._blank))
        return out

    # ---- states: each consumes text, and returns whether the next state should run -------------

    def _start(self) -> bool:
        """Start of a syntax without a trigger: the whole text is calls, or none is."""
        return self._head(otherwise=self._rest)

    def _rest(self) -> bool:
        self._state = self._rest
        self._content(len(self._text))
        return False

    def _free(self) -> bool:
        at = self._text.find(self._trigger)
        if at >= 0:
            self._content(at)
            self._state = self._after_trigger
            return True
        keep = 0 if self._ended else trigger_prefix_length(self._text, self._trigger)
        self._content(len(self._text) - keep)
        return False

    def _after_trigger(self) -> bool:
        return self._head(otherwise=self._not_a_call)

    def _not_a_call(self) -> bool:
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
        self._json = JsonObjectScanner()
        self._state = self._arguments
        return True

    def _arguments(self) -> bool:
        size = self._json.scan(self._text)
        self._out.append(CallArgumentsDelta(self._calls - 1, self._text[:size]))
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
        """Emit the first ``size`` characters as content, leading white space only before other
        text."""
        text, self._text = self._blank + self._text[:size], self._text[size:]
        self._blank = ""
        if not text.strip() and not self._has_content:
            self._blank = text
        elif text:
            self._out.append(ContentDelta(text))
            self._has_content = True


class JsonObjectScanner:
    """Finds the end of a JSON object that begins with the first character."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.complete = False

    def scan(self, text: str) -> int:
        """Return the number of characters of ``text`` that belong to the object."""
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


class PartialPattern(NamedTuple):
    """A pattern, and another for texts that may still become a match: then the parser waits."""

    full: re.Pattern[str]
    partial: re.Pattern[str]


class SyntaxPatterns(NamedTuple):
    """Where calls begin, continue and end in a text."""

    first: PartialPattern  # from the trigger to the arguments of the first call
    next: PartialPattern  # from the end of some arguments to those of the next call
    end: PartialPattern  # what follows the last arguments


@lru_cache(maxsize=16)
def syntax_patterns(syntax: ToolCallSyntax) -> SyntaxPatterns:
    """Compile the patterns of a syntax, which ignore white space in its marks."""
    head = [*_atoms(syntax.open), "([a-zA-Z0-9_-]{1,64})", *_atoms(syntax.middle), r"(?=\{)"]
    ready = [*head[:-1], _SPACE, head[-1]]
    close = _atoms(syntax.close)
    return SyntaxPatterns(
        first=_pattern([*_atoms(syntax.begin), *ready]),
        next=_pattern([*close, *_atoms(syntax.between), *ready]),
        end=_pattern([*close, *_atoms(syntax.end)]),
    )


def _atoms(mark: str) -> list[str]:
    """Return a pattern for each character, and for the white space before each word or sign."""
    tokens = re.findall(r"\w+|[^\w\s]", mark)
    return [atom for token in tokens for atom in (_SPACE, *map(re.escape, token))]


def _pattern(atoms: list[str]) -> PartialPattern:
    partial = ""
    for atom in reversed(atoms):
        partial = f"(?:{atom}{partial})?" if partial else f"(?:{atom})?"
    return PartialPattern(re.compile("".join(atoms)), re.compile(partial + r"\Z"))


def new_call_id(syntax: ToolCallSyntax) -> str:
    """Return a random id of the length that the model's template accepts."""
    if syntax.short_ids:
        return "".join(secrets.choice(_LETTERS) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def trigger_prefix_length(text: str, trigger: str) -> int:
    """Return the length of the longest end of ``text`` that is a proper prefix of ``trigger``,
    which is a model's and short."""
    for size in range(min(len(text), len(trigger) - 1), 0, -1):
        if text.endswith(trigger[:size]):
            return size
    return 0
