"""Tokens of one request to the text that may be sent: detokenize, then stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.detokenize import Detokenizer
from router.stop import StopMatcher


class Piece(NamedTuple):
    text: str
    used: int  # tokens taken in, the one that completed a stop string included
    stopped: bool


class TextStream:
    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops) if stops else None

    def push(self, tokens: Sequence[int]) -> Piece:
        if self._matcher is None:
            return Piece(self._detokenizer.push(tokens), len(tokens), False)
        # One by one: the token that completes a stop string is the last that counts.
        texts = []
        for used, token in enumerate(tokens, 1):
            text, stopped = self._matcher.push(self._detokenizer.push((token,)))
            texts.append(text)
            if stopped:
                return Piece("".join(texts), used, True)
        return Piece("".join(texts), len(tokens), False)

    def flush(self) -> Piece:
        """The end of the text. An incomplete character at it may still complete a stop string."""
        tail = self._detokenizer.flush()
        if self._matcher is None:
            return Piece(tail, 0, False)
        text, stopped = self._matcher.push(tail)
        return Piece(text if stopped else text + self._matcher.flush(), 0, stopped)
