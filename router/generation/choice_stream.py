"""One choice of a response: tokens of one generation, as the text that a client gets.

generation --ids, logprobs--> text (stop strings, characters) --> Delta, Delta, ... finish
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Literal, NamedTuple

from protocol.requests import Finish, Logprobs
from router.common.detokenizer import Detokenizer
from router.common.errors import failed
from router.common.tokenizer import Vocabulary
from router.generation.generation import Generation, Tokens
from router.generation.pending_logprobs import Shown, Waiting
from router.generation.stopwatch import Meter

# MERGED router.stop
# Stop strings: find them as text comes, and never let go of a character that may belong to one.
#
# A hit is the stop string that is complete first, character by character; of several complete at
# the
# same character, the longest. So the result does not depend on how the text was cut into pieces.


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


# MERGED router.text
# Tokens of one request to the text that may be sent: detokenize, then stop.


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


# MERGED router.scores
# What is known of a prompt's tokens: one of its choices asks for it, all of them show it.


class PromptScores:
    """``values``: of each token from the second on; empty until they are known. They come with the
    first tokens of the choice that asks; its deadlines end the others, too."""

    def __init__(self) -> None:
        self.values: list[Logprobs] = []
        self._known = asyncio.Event()

    def tell(self, values: list[Logprobs]) -> None:
        if not self._known.is_set():
            self.values = values
            self._known.set()

    async def known(self) -> None:
        await self._known.wait()


FinishReason = Literal["stop", "length", "tool_calls"]

REASONS: dict[Finish, FinishReason] = {Finish.STOP: "stop", Finish.LENGTH: "length"}


class Delta(NamedTuple):
    """What came of one choice. ``shown``: tokens whose text has now gone out in full."""

    choice: int  # its index
    text: str
    ids: list[int]
    shown: list[Shown]
    finish: FinishReason | None


class Manner(NamedTuple):
    """How the tokens of a request are shown; the same for all of its choices."""

    tracked: bool = False  # log-probabilities are wanted
    echo: bool = False  # the prompt's text stands in front
    stops: frozenset[int] = frozenset()  # tokens that end a text
    shows_stops: bool = False  # as part of the text
    skip_special: bool = True
    scored_only: bool = False  # max_tokens is 0: nothing of the output is wanted


class Choice:
    """Owns its generation; ``end()`` gives that up, and is called once."""

    def __init__(
        self,
        index: int,
        prompt: tuple[int, ...],
        generation: Generation,
        text: TextStream,
        meter: Meter,
        vocabulary: Vocabulary,
        manner: Manner,
        scores: PromptScores,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.generation = generation
        self.used = 0  # output tokens that count
        self.logprob = 0.0  # of the output; 0 where none was asked for
        self._text = text
        self._meter = meter
        self._vocabulary = vocabulary
        self._manner = manner
        self.scores = scores  # of the prompt, shared among its choices
        self._waiting = Waiting()
        self._sent = 0  # characters
        self._begun = False

    async def deltas(self) -> AsyncIterator[Delta]:
        """Text as it comes; the last one has a finish reason. Raises ApiError or ClientGone."""
        while True:
            tokens = await self.generation.next()
            if not self._begun:
                await self._scored()
            delta = self._delta(tokens)
            yield delta
            if delta.finish:
                return

    async def _scored(self) -> None:
        """Tell the other choices what came of the prompt, or wait to be told."""
        if self.generation.asks_for_prompt:
            self.scores.tell(self.generation.prompt_logprobs)
        elif self._manner.echo and self._manner.tracked:
            await self.scores.known()

    def end(self, status: str) -> None:
        """Let go of the work, wherever it stands, and account for it."""
        generation = self.generation
        generation.close()
        self._meter.ended(status, generation.attempts)

    def _delta(self, tokens: Tokens) -> Delta:
        front = "" if self._begun else self._front()
        self._begun = True
        if self._manner.scored_only:
            self.generation.close()
            return self._shown(front + self._text.flush().text, [], "length")
        ids = tokens.ids
        unshown = tokens.finish is Finish.STOP and self._unshown(ids)
        piece = self._text.push(ids[:-1] if unshown else ids)
        text, stopped = piece.text, piece.stopped
        if not unshown or stopped:
            ids = ids[: piece.used]
        self._count(ids, tokens.logprobs)
        if stopped:
            self.generation.close()  # the worker would go on
        elif tokens.finish:
            tail = self._text.flush()
            text, stopped = text + tail.text, tail.stopped
        return self._shown(front + text, ids, "stop" if stopped else REASONS.get(tokens.finish))

    def _unshown(self, ids: list[int]) -> bool:
        """The last of the tokens ended the text, and is no part of it."""
        if not ids or self._manner.shows_stops:
            return False
        return ids[-1] in self._manner.stops or self._vocabulary.says_nothing(ids[-1])

    def _count(self, ids: list[int], logprobs: list[Logprobs]) -> None:
        self._meter.tokens(len(ids), self.generation.cached_tokens)
        self.used += len(ids)
        self.logprob += sum(value.logprob for value in logprobs[: len(ids)])
        if self._manner.tracked:
            self._await(ids, logprobs)

    def _await(self, ids: Sequence[int], logprobs: Sequence[Logprobs | None]) -> None:
        """Each token waits for its text, whose place in characters ``spans`` tells."""
        spans, vocabulary = self._text.spans, self._vocabulary
        for place, (token, value) in enumerate(zip(ids, logprobs, strict=False)):
            span = spans[place] if place < len(spans) else (self._text.made, self._text.made)
            silent = vocabulary.says_nothing(token, skip_special=self._manner.skip_special)
            self._waiting.add(token, value, span, silent=silent)
        spans.clear()

    def _front(self) -> str:
        """The prompt, where it is wanted: the first tokens bring what is known of it."""
        if not self._manner.echo:
            return ""
        text = self._text.prefix(self.prompt)
        if self._manner.tracked:
            values = self.scores.values
            if len(values) != len(self.prompt) - 1:
                raise failed("the worker did not tell the prompt's log-probabilities")
            self._await(self.prompt, [None, *values])
        return text

    def _shown(self, text: str, ids: list[int], finish: FinishReason | None) -> Delta:
        self._sent += len(text)
        if finish:
            self._meter.complete()
        ready: list[Shown] = []
        if self._manner.tracked:
            ready = self._waiting.all() if finish else self._waiting.up_to(self._sent)
        return Delta(self.index, text, ids, ready, finish)
