"""How an answer is laid out: what completions and chats do differently, over what is the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from msgspec import UNSET, UnsetType

from protocol.logprobs import Logprobs
from router.choice import Delta, FinishReason
from router.explain import Explanation
from router.vocabulary import Vocabulary
from router.waiting import Shown
from router.wire_json import UsageField


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
