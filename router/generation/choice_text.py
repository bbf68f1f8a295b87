"""The text of one choice: batches of tokens become the deltas that its client gets.

    TokenBatch --OutputText--> text to send --+
        |                                     +--> ChoiceDelta
        +------PendingLogprobs--> tokens of it

``ChoiceStream`` owns one ``ChoiceText`` and passes it each batch of its queue. Nothing here depends
on workers: which of them drew a token, and how often the request was submitted, is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from protocol.requests import Finish, Logprobs, Request
from router.common.errors import internal_error
from router.generation.output_text import (
    OutputText,
    PendingLogprobs,
    SentToken,
    SharedPromptLogprobs,
)
from router.generation.reasoning_count import ReasoningCounter, ReasoningMarks
from router.generation.submission import TokenBatch
from router.text.vocabulary import Vocabulary

FinishReason = Literal["stop", "length", "tool_calls"]

FINISH_REASONS: dict[Finish, FinishReason] = {Finish.STOP: "stop", Finish.LENGTH: "length"}


class ChoiceDelta(NamedTuple):
    """What has been added to one choice since its last delta."""

    choice: int  # index of the choice in the response
    text: str
    ids: list[int]
    shown: list[SentToken]  # tokens whose text has now been sent in full, if requested
    finish: FinishReason | None
    stop: str | None = None  # the stop string that ended the text, if one did


class OutputOptions(NamedTuple):
    """How the tokens of a request become text; the same for all of its choices."""

    logprobs: bool = False  # each token is reported with its log-probabilities
    echo: bool = False  # the text begins with the prompt
    stop_strings: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()  # tokens that end a text
    min_tokens: int = 0  # tokens at the start that cannot stop
    keep_stops: bool = False  # stop strings and stop tokens are part of the text
    skip_special: bool = True
    prompt_only: bool = False  # max_tokens is 0: the output is not reported
    reasoning: ReasoningMarks | None = None  # how to count reasoning tokens; None: there are none


class ChoiceText:
    """The text of one choice so far.

    created --begin()--> begun --next_delta(), until it returns a finish reason--> finished
    """

    def __init__(
        self,
        index: int,
        request: Request,
        output: OutputOptions,
        vocabulary: Vocabulary,
        prompt_logprobs: SharedPromptLogprobs,
    ) -> None:
        self.has_begun = False
        self.output_tokens = 0  # tokens up to the stop string, if one came
        self.output_logprob = 0.0  # sum over them; 0 where log-probabilities were not requested
        self.prompt_logprobs = prompt_logprobs  # shared with the other choices of the prompt
        self._index = index
        self._request = request
        self._output = output
        self._vocabulary = vocabulary
        self._text = OutputText(
            vocabulary.detokenizer(skip_special=output.skip_special),
            output.stop_strings,
            min_tokens=output.min_tokens,
            keep_stop=output.keep_stops,
            tracked=output.logprobs,
        )
        self._pending = PendingLogprobs()
        self._reasoning = None if output.reasoning is None else ReasoningCounter(output.reasoning)
        self._echoed = ""  # text of the prompt, until the first delta
        self._sent_length = 0  # characters

    @property
    def reasoning_tokens(self) -> int | None:
        """Return how many output tokens were reasoning; None where there is no such thing."""
        return None if self._reasoning is None else self._reasoning.tokens

    async def begin(self, prompt_logprobs: list[Logprobs]) -> None:
        """Prepare the first delta once the first tokens have come, ``prompt_logprobs`` with them.

        A choice that requested them passes them to the others, and a choice that shows them without
        having requested them waits for them. Raises ApiError (500) if they are missing."""
        self.has_begun = True
        if self._request.sampling.prompt_logprobs is not None:
            self.prompt_logprobs.set(prompt_logprobs)
        elif self._output.echo and self._output.logprobs:
            await self.prompt_logprobs.wait()
        if self._output.echo:
            self._echoed = self._echo_prompt()

    def next_delta(self, batch: TokenBatch) -> ChoiceDelta:
        """Return what the next tokens add. After a stop string it is the last delta, although the
        worker may go on."""
        if self._output.prompt_only:
            return self._delta(self._text.flush().text, [], "length")
        ids = batch.tokens
        hides_last = batch.finish is Finish.STOP and self._hides_last(ids)
        piece = self._text.push(ids[:-1] if hides_last else ids)
        text, stopped = piece.text, piece.stopped
        if not hides_last or stopped:
            ids = ids[: piece.used]
        self._count(ids, batch.logprobs)
        if self._reasoning is not None and not self._reasoning.done:
            self._reasoning.count(ids, text)
        if batch.finish and not stopped:
            tail = self._text.flush()
            text, stopped = text + tail.text, tail.stopped
        return self._delta(text, ids, "stop" if stopped else FINISH_REASONS.get(batch.finish))

    def _hides_last(self, ids: list[int]) -> bool:
        """Whether the last token ended the text and is not part of it."""
        if not ids or self._output.keep_stops:
            return False
        return ids[-1] in self._output.stop_tokens or self._vocabulary.is_textless(ids[-1])

    def _count(self, ids: list[int], logprobs: list[Logprobs]) -> None:
        self.output_tokens += len(ids)
        if logprobs:
            self.output_logprob += sum(value.logprob for value in logprobs[: len(ids)])
        if self._output.logprobs:
            self._add_pending(ids, logprobs)

    def _add_pending(self, ids: Sequence[int], logprobs: Sequence[Logprobs | None]) -> None:
        text, skip_special = self._text, self._output.skip_special
        for place, (token, value) in enumerate(zip(ids, logprobs, strict=False)):
            span = text.spans[place] if place < len(text.spans) else (text.length, text.length)
            textless = self._vocabulary.is_textless(token, skip_special=skip_special)
            self._pending.add(token, value, span, textless=textless)
        text.spans.clear()

    def _echo_prompt(self) -> str:
        prompt = self._request.prompt
        text = self._text.push_prompt(prompt)
        if self._output.logprobs:
            values = self.prompt_logprobs.values
            if len(values) != len(prompt) - 1:
                raise internal_error("the worker did not send the prompt's log-probabilities")
            self._add_pending(prompt, [None, *values])
        return text

    def _delta(self, text: str, ids: list[int], finish: FinishReason | None) -> ChoiceDelta:
        text, self._echoed = self._echoed + text, ""
        self._sent_length += len(text)
        shown: list[SentToken] = []
        if self._output.logprobs:
            pending = self._pending
            shown = pending.take_all() if finish else pending.take_sent(self._sent_length)
        stop = self._text.stop if finish else None
        return ChoiceDelta(self._index, text, ids, shown, finish, stop)
