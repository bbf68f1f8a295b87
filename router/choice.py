"""One choice of a response: tokens of one generation, as the text that a client gets.

generation --ids, logprobs--> text (stop strings, characters) --> Delta, Delta, ... finish
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal, NamedTuple

from protocol.logprobs import Logprobs
from protocol.request import Finish
from router.errors import failed
from router.generate import Generation, Tokens
from router.meter import Meter
from router.scores import PromptScores
from router.text import TextStream
from router.vocabulary import Vocabulary
from router.waiting import Shown, Waiting

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
