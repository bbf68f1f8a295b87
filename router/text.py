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
    """``free``: so many tokens at the start cannot stop (``min_tokens``); a stop string lies wholly
    behind them. ``keep``: a stop string stays in the text. ``tracked``: see ``spans``."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: tuple[str, ...] = (),
        *,
        free: int = 0,
        keep: bool = False,
        tracked: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, keep=keep) if stops else None
        self._free = free
        self._tracked = tracked
        self.made = 0  # characters, sent or held back
        self.spans: list[tuple[int, int]] = []  # of each token, in characters; if tracked

    def prefix(self, tokens: Sequence[int]) -> str:
        """Text in front of the output, in which nothing is looked for."""
        if not self._tracked:
            return self._detokenizer.push(tokens)
        return "".join([self._one(token) for token in tokens])

    def push(self, tokens: Sequence[int]) -> Piece:
        if self._matcher is None and not self._tracked:
            return Piece(self._detokenizer.push(tokens), len(tokens), False)
        # One by one: the token that completes a stop string is the last that counts.
        texts = []
        for used, token in enumerate(tokens, 1):
            text, stopped = self._match(self._one(token))
            texts.append(text)
            if stopped:
                return Piece("".join(texts), used, True)
        return Piece("".join(texts), len(tokens), False)

    def flush(self) -> Piece:
        """The end of the text. An incomplete character at it may still complete a stop string."""
        tail = self._detokenizer.flush()
        if self._matcher is None or self._free >= 0:
            return Piece(tail, 0, False)
        text, stopped = self._matcher.push(tail)
        return Piece(text if stopped else text + self._matcher.flush(), 0, stopped)

    def _one(self, token: int) -> str:
        if not self._tracked:
            return self._detokenizer.push((token,))
        text, before = self._detokenizer.push_one(token)
        start, self.made = self.made + before, self.made + len(text)
        self.spans.append((start, self.made))
        return text

    def _match(self, text: str) -> tuple[str, bool]:
        self._free -= 1
        if self._matcher is None or self._free >= 0:
            return text, False
        return self._matcher.push(text)
