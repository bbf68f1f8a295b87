"""Stop strings: find them as text comes, and never let go of a character that may belong to one.

A hit is the stop string that is complete first, character by character; of several complete at the
same character, the longest. So the result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations


class StopMatcher:
    """Passes text through until a stop string.

    Held back is the longest end of the text that is a proper beginning of some stop string.
    ``keep``: a stop string that came is text, too.
    """

    def __init__(self, stops: tuple[str, ...], *, keep: bool = False) -> None:
        self._stops = stops
        self._keep = keep
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """The text that is safe to send, and whether a stop string came. None may follow a hit."""
        text = self._held + piece
        hits = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if hits:
            self._held = ""
            end, begin = min(hits)
            return text[: end if self._keep else begin], True
        keep = max((overlap(text, s) for s in self._stops), default=0)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """What is held back, when no more text will come."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
