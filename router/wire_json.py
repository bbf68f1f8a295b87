"""The JSON of responses. Field order is the order on the wire; UNSET fields are left out."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from protocol.request import Finish
from router.explain import Explanation

FinishReason = Literal["stop", "length"]

REASONS: dict[Finish, FinishReason] = {Finish.STOP: "stop", Finish.LENGTH: "length"}

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int) -> Usage:
        return cls(prompt, completion, prompt + completion, PromptDetails(cached))


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole response, or a chunk of a stream. ``usage`` is null in chunks before the last."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET
    baton: Explanation | UnsetType = UNSET  # for who asked: in the last chunk of a stream


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "baton"
    max_model_len: int | None  # None while no worker has been seen


def frame(payload: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + payload + b"\n\n"
