"""The JSON types of responses. The order of fields is that on the wire; UNSET fields are omitted.

Class names appear in the OpenAPI document as names of components.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from router.generation.choice_text import FinishReason
from router.generation.explain import Explanation

encode = msgspec.json.Encoder().encode


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int, reasoning: int | None = None) -> Usage:
        """``reasoning``: of the completion's tokens; None where there is no such thing."""
        details = UNSET if reasoning is None else CompletionDetails(reasoning)
        return cls(prompt, completion, prompt + completion, PromptDetails(cached), details)

    def before_output(self) -> Usage:
        """Return the usage of a stream that has no tokens yet."""
        return Usage.of(self.prompt_tokens, 0, self.prompt_tokens_details.cached_tokens)


UsageField = Usage | UnsetType | None
"""Null in the chunks before the last where usage was requested."""

# ---- completions ----------------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Lists of equal length. The first token of an echoed prompt has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(msgspec.Struct, frozen=True):
    logprob: float
    rank: int | None
    decoded_token: str


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptToken] | None] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A response, or a chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageField = UNSET
    system_fingerprint: str
    baton: Explanation | UnsetType = UNSET


# ---- chats ----------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class Function(msgspec.Struct, frozen=True, omit_defaults=True):
    """The function of a tool call; in a stream only the first piece of a call has ``name``."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call: ``index`` only in streams, ``id`` and ``type`` only in the first piece of a
    call."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: Function


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    token_ids: list[int] | UnsetType = UNSET


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageField = UNSET
    system_fingerprint: str
    service_tier: Literal["default"] = "default"
    prompt_logprobs: list[dict[str, PromptToken] | None] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    baton: Explanation | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageField = UNSET
    system_fingerprint: str
    service_tier: Literal["default"] = "default"
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    baton: Explanation | UnsetType = UNSET


# ---- others ---------------------------------------------------------------------------------


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "baton"
    root: str  # the model's own name, of which ``id`` may be an alias
    parent: None = None
    max_model_len: int | None  # None until a worker has registered


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]
