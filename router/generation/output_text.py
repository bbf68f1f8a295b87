"""Token ids of one choice become text that may be sent, with stop strings and log-probabilities.

    token ids --Detokenizer--> characters --StopMatcher--> text to send
                                   |
                                   +--> PendingLogprobs: sent with the text of their token

A ``ChoiceText`` owns one ``OutputText`` and one ``PendingLogprobs``; the choices of one prompt
share one ``SharedPromptLogprobs``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from protocol.requests import Logprobs
from router.generation.stop_matcher import StopMatcher
from router.text.detokenizer import Detokenizer


class TextPiece(NamedTuple):
    """Text that is ready to be sent."""

    text: str
    used: int  # tokens consumed, including the one that completed a stop string
    stopped: bool


class OutputText:
    """The text of one choice so far. Created and owned by its ``ChoiceText``.

    ``min_tokens``: a stop string must lie wholly behind that many tokens. ``keep_stop``: a stop
    string stays in the text. ``tracked``: ``spans`` is filled.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: tuple[str, ...] = (),
        *,
        min_tokens: int = 0,
        keep_stop: bool = False,
        tracked: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, keep_stop=keep_stop) if stops else None
        self._before_stops = min_tokens  # tokens that still cannot stop
        self._tracked = tracked
        self.length = 0  # characters, sent or held back
        self.spans: list[tuple[int, int]] = []  # [start, end) of each token in characters

    @property
    def stop(self) -> str | None:
        """Return the stop string that ended the text, if one did."""
        return None if self._matcher is None else self._matcher.found

    def push_prompt(self, tokens: Sequence[int]) -> str:
        """Return the text of the prompt, in which stop strings have no effect."""
        if not self._tracked:
            return self._detokenizer.push(tokens)
        return "".join([self._push_one(token) for token in tokens])

    def push(self, tokens: Sequence[int]) -> TextPiece:
        """Consume output tokens up to the one that completes a stop string."""
        if self._matcher is None and not self._tracked:
            return TextPiece(self._detokenizer.push(tokens), len(tokens), False)
        texts = []
        for used, token in enumerate(tokens, 1):
            text, stopped = self._match(self._push_one(token))
            texts.append(text)
            if stopped:
                return TextPiece("".join(texts), used, True)
        return TextPiece("".join(texts), len(tokens), False)

    def flush(self) -> TextPiece:
        """Return the rest of the text, once no more tokens come.

        An incomplete character at the end may still complete a stop string.
        """
        tail = self._detokenizer.flush()
        if self._matcher is None or self._before_stops >= 0:
            return TextPiece(tail, 0, False)
        text, stopped = self._matcher.push(tail)
        return TextPiece(text if stopped else text + self._matcher.flush(), 0, stopped)

    def _push_one(self, token: int) -> str:
        if not self._tracked:
            return self._detokenizer.push((token,))
        text, before = self._detokenizer.push_one(token)
        start, self.length = self.length + before, self.length + len(text)
        self.spans.append((start, self.length))
        return text

    def _match(self, text: str) -> tuple[str, bool]:
        self._before_stops -= 1
        if self._matcher is None or self._before_stops >= 0:
            return text, False
        return self._matcher.push(text)


class SentToken(NamedTuple):
    """A token with its log-probabilities as a client gets it."""

    token: int
    logprobs: Logprobs | None  # None for the first token of a prompt
    offset: int  # where its text begins, in characters


class PendingLogprobs:
    """Tokens with log-probabilities whose text has not been sent yet.

    A token is sent with its text, not before: text that is held back must not show up in
    log-probabilities. It is sent with all of its text: one character may take several tokens.
    """

    def __init__(self) -> None:
        self._closed: deque[tuple[SentToken, int]] = deque()  # with the end of their text
        self._open: list[SentToken] = []  # parts of a character that is not complete yet
        self._end = 0

    def add(
        self, token: int, logprobs: Logprobs | None, span: tuple[int, int], *, textless: bool
    ) -> None:
        """Append a token. ``span`` is where the text that it completes begins and ends, in
        characters; text between the previous end and this start belongs to earlier tokens, which
        had left a character incomplete. ``textless``: it is no part of any text."""
        start, end = span
        if start > self._end:
            self._close(start)
        self._open.append(SentToken(token, logprobs, start))
        if end > start or (textless and len(self._open) == 1):
            self._close(end)
        self._end = end

    def _close(self, end: int) -> None:
        self._closed.extend((token, end) for token in self._open)
        self._open.clear()

    def take_sent(self, characters: int) -> list[SentToken]:
        """Remove and return tokens whose text is within the first ``characters`` sent."""
        ready = []
        while self._closed and self._closed[0][1] <= characters:
            ready.append(self._closed.popleft()[0])
        return ready

    def take_all(self) -> list[SentToken]:
        """Remove and return all tokens, once the text has ended."""
        left = [token for token, _ in self._closed] + self._open
        self._closed.clear()
        self._open.clear()
        return left


class SharedPromptLogprobs:
    """Log-probabilities of a prompt: one of its choices requests them, all of them show them.

    ``values`` holds those of each token from the second on, and is empty until the first tokens of
    the requesting choice arrive. Its deadlines end the waiting choices, too.
    """

    def __init__(self) -> None:
        self.values: list[Logprobs] = []
        self._known = asyncio.Event()

    def set(self, values: list[Logprobs]) -> None:
        if not self._known.is_set():
            self.values = values
            self._known.set()

    async def wait(self) -> None:
        await self._known.wait()
