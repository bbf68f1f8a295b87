"""How an answer is laid out: what completions and chats do differently, over what is the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from msgspec import UNSET, UnsetType

from protocol.requests import Logprobs
from router.common.tokenizer import Vocabulary
from router.generation.choice_stream import Delta, FinishReason
from router.generation.explain import Explanation
from router.generation.pending_logprobs import Shown
from router.openai.answers.wire_json import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptToken,
    TokenLogprob,
    TopLogprob,
    UsageField,
)


class Head(NamedTuple):
    """What every part of an answer begins with."""

    id: str
    created: int  # seconds since the epoch
    model: str
    fingerprint: str


class Answer(NamedTuple):
    """A choice that has ended. ``logprob``: of its output."""

    choice: int  # its index
    prompt: tuple[int, ...]
    text: str
    ids: list[int]
    shown: list[Shown]
    finish: FinishReason
    logprob: float = 0.0
    prompt_logprobs: Sequence[Logprobs] = ()  # from its second token on


class Form(Protocol):
    """Lays out one answer. It may keep what it needs to know of the parts before."""

    def chunks(self, delta: Delta, usage: UsageField) -> list[bytes]:
        """JSON of the chunks of a stream that this becomes; none where nothing can be shown."""

    def closing(self, usage: UsageField, baton: Explanation | UnsetType = UNSET) -> bytes:
        """JSON of a chunk without choices."""

    def whole(
        self, answers: list[Answer], usage: UsageField, baton: Explanation | UnsetType
    ) -> bytes:
        """JSON of a response."""


class Naming(NamedTuple):
    """How tokens are named in log-probabilities."""

    vocabulary: Vocabulary
    as_ids: bool  # vLLM's return_tokens_as_token_ids

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else self.vocabulary.name_of(token)


# MERGED router.api.logprobs
# Log-probabilities in OpenAI's two shapes, and in vLLM's one for prompts.

LEAST = -9999.0
"""Stands for the logarithm of 0 (and of what is no number), which JSON has no word for."""


def finite(logprob: float) -> float:
    return max(LEAST, logprob) if logprob <= 0.0 else (0.0 if logprob > 0.0 else LEAST)


def of_completion(shown: Sequence[Shown], naming: Naming) -> CompletionLogprobs:
    """``top_logprobs`` has the token that was drawn beside the most likely ones."""
    return CompletionLogprobs(
        tokens=[naming.name(s.token) for s in shown],
        token_logprobs=[finite(s.logprobs.logprob) if s.logprobs else None for s in shown],
        top_logprobs=[_top(s, naming) for s in shown],
        text_offset=[s.offset for s in shown],
    )


def _top(shown: Shown, naming: Naming) -> dict[str, float] | None:
    values = shown.logprobs
    if values is None:
        return None
    top = {
        naming.name(token): finite(logprob)
        for token, logprob in zip(values.top_tokens, values.top_logprobs, strict=True)
    }
    top.setdefault(naming.name(shown.token), finite(values.logprob))
    return top


def of_chat(shown: Sequence[Shown], naming: Naming) -> ChatLogprobs:
    return ChatLogprobs([_token(s, naming) for s in shown if s.logprobs is not None])


def _token(shown: Shown, naming: Naming) -> TokenLogprob:
    values = shown.logprobs
    assert values is not None
    octets = naming.vocabulary.octets_of
    top = [
        TopLogprob(naming.name(token), finite(logprob), octets(token))
        for token, logprob in zip(values.top_tokens, values.top_logprobs, strict=True)
    ]
    name = naming.name(shown.token)
    return TokenLogprob(name, finite(values.logprob), octets(shown.token), top)


def of_prompt(
    prompt: Sequence[int], logprobs: Sequence[Logprobs], naming: Naming
) -> list[dict[str, PromptToken] | None]:
    """For each token of the prompt: it and the most likely ones by their ids; null for the first.
    The rank of the k-th most likely is k."""
    rows: list[dict[str, PromptToken] | None] = [None]
    for token, values in zip(prompt[1:], logprobs, strict=True):
        row = {
            str(other): _prompt_token(naming, other, logprob, rank)
            for rank, (other, logprob) in enumerate(
                zip(values.top_tokens, values.top_logprobs, strict=True), 1
            )
        }
        row.setdefault(str(token), _prompt_token(naming, token, values.logprob, values.rank))
        rows.append(row)
    return rows


def _prompt_token(naming: Naming, token: int, logprob: float, rank: int) -> PromptToken:
    return PromptToken(finite(logprob), rank, naming.vocabulary.name_of(token))
