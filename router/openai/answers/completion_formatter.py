"""Formats responses of ``/v1/completions``: ``text_completion`` objects."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import UNSET, UnsetType

from protocol.requests import Logprobs
from router.generation.choice_text import ChoiceDelta
from router.generation.explain import Explanation
from router.openai.answers.formatter import (
    ChunkStream,
    FinishedChoice,
    ResponseHeader,
    TokenNaming,
    completion_logprobs,
    prompt_token_logprobs,
)
from router.openai.answers.wire_json import (
    Completion,
    CompletionChoice,
    PromptToken,
    UsageField,
    encode,
)


class CompletionResponseOptions(NamedTuple):
    """What a completion shows beside the text."""

    logprobs: bool
    token_ids: bool
    prompt_logprobs: int | None  # most likely tokens per prompt token; None: off
    include_usage: bool = False


class CompletionFormatter(ChunkStream):
    """The formatter of one request; ``prompts`` has the prompt of each choice."""

    def __init__(
        self,
        header: ResponseHeader,
        naming: TokenNaming,
        options: CompletionResponseOptions,
        prompts: list[tuple[int, ...]],
    ) -> None:
        super().__init__(include_usage=options.include_usage)
        self._header = header
        self._naming = naming
        self._options = options
        self._unsent_prompts = dict(enumerate(prompts))

    def chunks(self, delta: ChoiceDelta, usage: UsageField) -> list[bytes]:
        options = self._options
        if not (delta.text or delta.finish or delta.shown or options.token_ids):
            return []
        assert delta.finish != "tool_calls"
        choice = CompletionChoice(
            index=delta.choice,
            text=delta.text,
            logprobs=completion_logprobs(delta.shown, self._naming) if options.logprobs else None,
            finish_reason=delta.finish,
            token_ids=delta.ids if options.token_ids else UNSET,
            prompt_token_ids=self._prompt_ids(delta.choice),
        )
        return [encode(self._completion([choice], usage))]

    def final_chunk(self, usage: UsageField, baton: Explanation | UnsetType = UNSET) -> bytes:
        return encode(self._completion([], usage, baton))

    def response(
        self, choices: list[FinishedChoice], usage: UsageField, baton: Explanation | UnsetType
    ) -> bytes:
        return encode(self._completion([self._choice(c) for c in choices], usage, baton))

    def _choice(self, answer: FinishedChoice) -> CompletionChoice:
        options = self._options
        assert answer.finish != "tool_calls"
        return CompletionChoice(
            index=answer.choice,
            text=answer.text,
            logprobs=completion_logprobs(answer.shown, self._naming) if options.logprobs else None,
            finish_reason=answer.finish,
            token_ids=answer.ids if options.token_ids else UNSET,
            prompt_token_ids=answer.prompt if options.token_ids else UNSET,
            prompt_logprobs=self._prompt_logprobs(answer),
        )

    def _prompt_logprobs(
        self, answer: FinishedChoice
    ) -> list[dict[str, PromptToken] | None] | UnsetType:
        count = self._options.prompt_logprobs
        if count is None:
            return UNSET
        cut = [_limit_top(values, count) for values in answer.prompt_logprobs]
        return prompt_token_logprobs(answer.prompt, cut, self._naming)

    def _prompt_ids(self, index: int) -> tuple[int, ...] | UnsetType:
        """Return the prompt for the first chunk of a choice."""
        prompt = self._unsent_prompts.pop(index, None) if self._options.token_ids else None
        return UNSET if prompt is None else prompt

    def _completion(
        self,
        choices: list[CompletionChoice],
        usage: UsageField,
        baton: Explanation | UnsetType = UNSET,
    ) -> Completion:
        header = self._header
        return Completion(
            id=header.id,
            created=header.created,
            model=header.model,
            choices=choices,
            usage=usage,
            system_fingerprint=header.fingerprint,
            baton=baton,
        )


def _limit_top(values: Logprobs, count: int) -> Logprobs:
    """Keep the ``count`` most likely tokens: echo may have requested more."""
    return Logprobs(
        values.logprob, values.rank, values.top_tokens[:count], values.top_logprobs[:count]
    )
