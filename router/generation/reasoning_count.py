"""``ReasoningCounter``: how many output tokens of one choice are reasoning.

Tokens are counted by their ids. Where a marker is not one token, it is found in the text, and all
tokens of the batch in which it ends are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ReasoningMarks(NamedTuple):
    """What begins and ends the reasoning in the tokens of a request's choices."""

    is_open: bool  # the begin marker is in the prompt
    begin: int | None  # token id; None: the marker is spelled
    ends: frozenset[int]
    end_text: str  # used where ``ends`` is empty
    begin_text: str = ""  # used where ``begin`` is None; an output without it has no reasoning


REASONING_IS_OFF = ReasoningMarks(False, None, frozenset(), "")
"""Marks of an output without reasoning, from a model that can think."""


class ReasoningCounter:
    """The counter of one choice."""

    def __init__(self, marks: ReasoningMarks) -> None:
        self.tokens = 0  # without the markers
        self.done = marks == REASONING_IS_OFF  # no further token is reasoning
        self._marks = marks
        self._is_open = marks.is_open
        self._head = ""  # the text so far, where it may still become the begin marker
        self._head_tokens = 0
        self._tail = ""

    def count(self, ids: Sequence[int], text: str) -> None:
        """Count the next tokens, which have added ``text``."""
        marks = self._marks
        if not self._is_open and marks.begin is None:
            self._expect_begin(ids, text)
            return
        if not marks.ends:
            self._count_spelled(ids, text)
            return
        for token in ids:
            if self._is_open and token in marks.ends:
                self.done = True
                return
            if token == marks.begin:
                self._is_open = True
            elif self._is_open:
                self.tokens += 1
        self.done = not self._is_open and bool(text.strip())

    def _expect_begin(self, ids: Sequence[int], text: str) -> None:
        """Decide from the first text, without white space, whether the output has reasoning."""
        begin = self._marks.begin_text
        self._head = (self._head + text).lstrip()
        self._head_tokens += len(ids)
        if self._head.startswith(begin):
            self._is_open = True
            self.tokens = self._head_tokens
            self.done = self._marks.end_text in self._head
            self._tail = self._head[-len(self._marks.end_text) :]
        else:
            self.done = not begin.startswith(self._head)

    def _count_spelled(self, ids: Sequence[int], text: str) -> None:
        end = self._marks.end_text
        window = self._tail + text
        self.done = end in window
        self._tail = window[-len(end) :]
        self.tokens += len(ids)
