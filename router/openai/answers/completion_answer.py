"""``text_completion`` objects."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import UNSET, UnsetType

from protocol.requests import Logprobs
from router.generation.choice_stream import Delta
from router.generation.explain import Explanation
from router.openai.answers.answer_form import Answer, Head, Naming, of_completion, of_prompt
from router.openai.answers.wire_json import (
    Completion,
    CompletionChoice,
    PromptToken,
    UsageField,
    encode,
)


class CompletionShows(NamedTuple):
    logprobs: bool
    token_ids: bool
    prompt_logprobs: int | None  # most likely tokens for each of the prompt; None: nothing


class CompletionForm:
    """``prompts``: of each choice, by its index."""

    def __init__(
        self, head: Head, naming: Naming, shows: CompletionShows, prompts: list[tuple[int, ...]]
    ) -> None:
        self._head = head
        self._naming = naming
        self._shows = shows
        self._unseen = dict(enumerate(prompts))  # whose ids have not been sent yet

    def chunks(self, delta: Delta, usage: UsageField) -> list[bytes]:
        shows = self._shows
        if not (delta.text or delta.finish or delta.shown or shows.token_ids):
            return []
        assert delta.finish != "tool_calls"
        choice = CompletionChoice(
            index=delta.choice,
            text=delta.text,
            logprobs=of_completion(delta.shown, self._naming) if shows.logprobs else None,
            finish_reason=delta.finish,
            token_ids=delta.ids if shows.token_ids else UNSET,
            prompt_token_ids=self._prompt_ids(delta.choice),
        )
        return [encode(self._completion([choice], usage))]

    def closing(self, usage: UsageField, baton: Explanation | UnsetType = UNSET) -> bytes:
        return encode(self._completion([], usage, baton))

    def whole(
        self, answers: list[Answer], usage: UsageField, baton: Explanation | UnsetType
    ) -> bytes:
        choices = [self._choice(answer) for answer in answers]
        return encode(self._completion(choices, usage, baton))

    def _choice(self, answer: Answer) -> CompletionChoice:
        shows = self._shows
        assert answer.finish != "tool_calls"
        return CompletionChoice(
            index=answer.choice,
            text=answer.text,
            logprobs=of_completion(answer.shown, self._naming) if shows.logprobs else None,
            finish_reason=answer.finish,
            token_ids=answer.ids if shows.token_ids else UNSET,
            prompt_token_ids=answer.prompt if shows.token_ids else UNSET,
            prompt_logprobs=self._of_prompt(answer),
        )

    def _of_prompt(self, answer: Answer) -> list[dict[str, PromptToken] | None] | UnsetType:
        count = self._shows.prompt_logprobs
        if count is None:
            return UNSET
        cut = [_best(values, count) for values in answer.prompt_logprobs]
        return of_prompt(answer.prompt, cut, self._naming)

    def _prompt_ids(self, index: int) -> tuple[int, ...] | UnsetType:
        """In a choice's first chunk only."""
        prompt = self._unseen.pop(index, None) if self._shows.token_ids else None
        return UNSET if prompt is None else prompt

    def _completion(
        self,
        choices: list[CompletionChoice],
        usage: UsageField,
        baton: Explanation | UnsetType = UNSET,
    ) -> Completion:
        head = self._head
        return Completion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=choices,
            usage=usage,
            system_fingerprint=head.fingerprint,
            baton=baton,
        )


def _best(values: Logprobs, count: int) -> Logprobs:
    """Only the ``count`` most likely: echo may have asked for more."""
    return Logprobs(
        values.logprob, values.rank, values.top_tokens[:count], values.top_logprobs[:count]
    )
