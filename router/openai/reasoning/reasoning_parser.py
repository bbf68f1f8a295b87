"""Splits a model's text into reasoning and the text outside of it while it is generated.

    WAITING --begin--> REASONING --end--> AFTER --other text--> done: all further text is outside
       |                    |  ^------begin--'
       '--other text        '--opener of a tool call-->

The result does not depend on how the text is cut: the pieces join to the same two texts. What may
still become a marker is held back, at most its length and ``MAX_BLANK`` characters of white space.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from router.openai.reasoning.reasoning_syntax import ReasoningStart, ReasoningSyntax

MAX_BLANK = 64
"""Characters of white space before a marker; with more, text is no marker."""


State = Callable[[], bool]


class ReasoningDelta(NamedTuple):
    """A piece of the reasoning."""

    text: str


class SplitText(NamedTuple):
    """What a text has added; the reasoning comes first."""

    reasoning: str
    outside: str


class ReasoningParser:
    """The parser of one choice: ``push`` for each text, with ``last`` for the last one, until it is
    ``done``. ``openers``: texts that end the reasoning and belong to what follows."""

    def __init__(
        self, syntax: ReasoningSyntax, start: ReasoningStart, openers: Sequence[str] = ()
    ) -> None:
        self._syntax = syntax
        self._marks = _Marks.of((syntax.end, *openers))
        self._state = {
            "open": self._first_text,
            "waiting": self._waiting,
            "closed": self._done,
        }[start]
        self._text = ""  # not yet classified
        self._last = False
        self._reasoning: list[str] = []
        self._newlines = 0  # held back: they belong to the end marker if it follows
        self._is_section_start = self._has_reasoning = False
        self._is_plain = False  # within a section, behind its first text
        self._outside = ""

    @property
    def done(self) -> bool:
        """Return whether all further text is outside of the reasoning."""
        return self._state == self._done

    def takes(self, text: str) -> bool:
        """Return whether the next ``text``, not empty, is reasoning as it is and changes no state.
        Most of it is, and is streamed without a call of ``push``."""
        return (
            bool(text)
            and self._is_plain
            and not (self._text or self._newlines)
            and self._marks.first.search(text) is None
        )

    def push(self, text: str, *, last: bool) -> SplitText:
        """Return what ``text`` completes."""
        self._last = last
        self._text += text
        while self._text and self._state():
            pass
        found = SplitText("".join(self._reasoning), self._outside)
        self._reasoning.clear()
        self._outside = ""
        return found

    # ---- states: each consumes text, and returns whether the next state should run -------------

    def _waiting(self) -> bool:
        return self._find_marker(otherwise=self._done)

    def _first_text(self) -> bool:
        """Start of an output whose begin marker is in the prompt; the model may repeat it."""
        return self._find_marker(otherwise=self._reason)

    def _after(self) -> bool:
        return self._find_marker(otherwise=self._after_last_marker)

    def _find_marker(self, otherwise: State) -> bool:
        """Expect white space and a marker."""
        syntax = self._syntax
        text = self._text.lstrip()
        blank = len(self._text) - len(text)
        if blank <= MAX_BLANK:
            if text.startswith(syntax.begin):
                self._text = text[len(syntax.begin) :]
                self._begin_section()
                return True
            if text.startswith(syntax.end):
                self._text = text[len(syntax.end) :]
                self._state = self._after
                return True
            if not self._last and (syntax.begin.startswith(text) or syntax.end.startswith(text)):
                return False
        if otherwise == self._reason:
            self._begin_section()
        else:
            self._state = otherwise
        return True

    def _begin_section(self) -> None:
        self._state = self._reason
        self._is_section_start = self._syntax.newlines
        self._newlines = 1 if self._has_reasoning and self._syntax.newlines else 0

    def _reason(self) -> bool:
        found = self._marks.whole.search(self._text)
        if found:
            self._add_reasoning(self._text[: found.start()])
            self._text = self._text[found.start() :]
            self._is_plain = False
            self._state = self._done
            if found[0] == self._syntax.end:
                self._text = self._text[len(found[0]) :]
                self._state = self._after
            return True
        keep = 0 if self._last else self._marks.partial_length(self._text)
        size = len(self._text) - keep
        self._add_reasoning(self._text[:size])
        self._text = self._text[size:]
        return False

    def _after_last_marker(self) -> bool:
        if self._syntax.newlines:
            self._text = self._text.lstrip("\n")
        if self._text:
            self._state = self._done
        return True

    def _done(self) -> bool:
        self._outside += self._text
        self._text = ""
        return False

    def _add_reasoning(self, text: str) -> None:
        self._is_plain |= bool(text)
        if not self._syntax.newlines:
            self._reasoning.append(text)
            return
        if self._is_section_start:
            text = text.lstrip("\n")
        body = text.rstrip("\n")
        self._is_plain &= bool(body) or not self._is_section_start
        if body:
            self._reasoning += ["\n" * self._newlines, body]
            self._newlines = 0
            self._is_section_start = False
            self._has_reasoning = True
        self._newlines += len(text) - len(body)


class _Marks(NamedTuple):
    """The texts that end the reasoning, as patterns."""

    whole: re.Pattern[str]
    partial: re.Pattern[str]  # the end of a text that is a proper prefix of one of them
    first: re.Pattern[str]  # a first character of one of them, or a newline
    longest: int

    @staticmethod
    @lru_cache(maxsize=16)
    def of(texts: tuple[str, ...]) -> _Marks:
        texts = tuple(sorted(filter(None, texts), key=len, reverse=True))
        prefixes = {text[:size] for text in texts for size in range(1, len(text))}
        partial = "|".join(map(re.escape, sorted(prefixes, key=len, reverse=True)))
        whole = re.compile("|".join(map(re.escape, texts)))
        first = re.compile("|".join(["\n", *(re.escape(text[0]) for text in texts)]))
        return _Marks(whole, re.compile(rf"(?:{partial})\Z"), first, len(texts[0]))

    def partial_length(self, text: str) -> int:
        found = self.partial.search(text, max(0, len(text) - self.longest + 1))
        return len(found[0]) if found else 0
