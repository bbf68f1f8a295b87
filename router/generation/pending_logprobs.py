"""Log-probabilities of tokens whose text has not gone out yet.

A token's goes out with the text that it is part of: not before, as nothing may be known of text
that is held back; and with all of it, as one character may take several tokens.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from protocol.requests import Logprobs


class Shown(NamedTuple):
    """A token as a client gets it."""

    token: int
    logprobs: Logprobs | None  # None: the first of a prompt, which nothing came before
    offset: int  # where its text begins, in characters


class Waiting:
    def __init__(self) -> None:
        self._closed: deque[tuple[Shown, int]] = deque()  # with where their text ends
        self._open: list[Shown] = []  # parts of a character that is not whole yet
        self._end = 0

    def add(
        self, token: int, logprobs: Logprobs | None, span: tuple[int, int], *, silent: bool
    ) -> None:
        """``span``: where the text that comes with this token begins and ends, in characters; what
        lies between the last end and this start belongs to tokens before it, which had left a
        character incomplete. ``silent``: it is no part of any text."""
        start, end = span
        if start > self._end:
            self._close(start)
        self._open.append(Shown(token, logprobs, start))
        if end > start or (silent and len(self._open) == 1):
            self._close(end)
        self._end = end

    def _close(self, end: int) -> None:
        self._closed.extend((shown, end) for shown in self._open)
        self._open.clear()

    def up_to(self, sent: int) -> list[Shown]:
        """Those whose text is among the first ``sent`` characters; each is given once."""
        ready = []
        while self._closed and self._closed[0][1] <= sent:
            ready.append(self._closed.popleft()[0])
        return ready

    def all(self) -> list[Shown]:
        """All that are left: the text has ended."""
        left = [shown for shown, _ in self._closed] + self._open
        self._closed.clear()
        self._open.clear()
        return left
