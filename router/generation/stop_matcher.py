"""Finds stop strings in a text while it is generated.

A stop string of 4,096 characters costs no more per character of text than a short one: each is
matched by the method of Knuth, Morris and Pratt ("Fast pattern matching in strings", SIAM Journal
on Computing 6, 1977). ``OutputText`` owns one ``StopMatcher``.
"""

from __future__ import annotations

from array import array


class StopString:
    """One stop string and how much of it the text ends with.

    ``matched`` falls along the borders of the string: the border of a prefix is the longest proper
    prefix of it that is also its end. The table of borders grows with the longest match so far, so
    nothing is computed in advance, and n characters of text take O(n) steps in all.
    """

    __slots__ = ("_borders", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # characters at the end of the text that begin the stop string
        self._borders = array("I", (0, 0))  # by length of the prefix

    def push(self, character: str) -> bool:
        """Return whether one more character completes the stop string (then call no more)."""
        self.matched = self._extended(self.matched, character)
        if self.matched == len(self._borders):
            border = self._borders[self.matched - 1]
            self._borders.append(self._extended(border, self.text[self.matched - 1]))
        return self.matched == len(self.text)

    def _extended(self, size: int, character: str) -> int:
        """Return the length of the longest prefix at the end of a text that ended with the prefix
        of ``size`` characters, after one more character."""
        text, borders = self.text, self._borders
        while size and text[size] != character:
            size = borders[size]
        return size + 1 if text[size] == character else 0


class StopMatcher:
    """Passes text through until a stop string is complete.

    It holds back the longest end of the text that is a proper prefix of a stop string. The stop
    string that is complete first counts, character by character; of several that are complete at
    the same character, the longest. The result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: tuple[str, ...], *, keep_stop: bool = False) -> None:
        self._stops = [StopString(stop) for stop in stops]
        self._first = frozenset(stop[0] for stop in stops)
        self._keep_stop = keep_stop
        self._held = ""
        self.found: str | None = None
        """The stop string that was complete first."""

    def push(self, piece: str) -> tuple[str, bool]:
        """Return the text that may be sent, and whether a stop string is complete (then call no
        more)."""
        if not self._held and self._first.isdisjoint(piece):
            return piece, False
        text = self._held + piece
        for end, character in enumerate(piece, len(self._held) + 1):
            complete = [stop.text for stop in self._stops if stop.push(character)]
            if complete:
                self._held, self.found = "", max(complete, key=len)
                return text[: end if self._keep_stop else end - len(self.found)], True
        cut = len(text) - max(stop.matched for stop in self._stops)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """Return what is held back, once no more text comes."""
        held, self._held = self._held, ""
        return held
