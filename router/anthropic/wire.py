"""The JSON types of ``/v1/messages``: responses and the events of a stream. UNSET fields are
omitted."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from router.generation.explain import Explanation
from router.openai.answers.wire_json import Usage

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]

encode = msgspec.json.Encoder().encode


class AnthropicOutputDetails(msgspec.Struct, frozen=True):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True):
    """Tokens of a message. ``input_tokens`` are those that no cache had."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens_details: AnthropicOutputDetails | UnsetType = UNSET

    @classmethod
    def of(cls, usage: Usage) -> MessageUsage:
        cached = usage.prompt_tokens_details.cached_tokens
        reasoning = usage.completion_tokens_details
        details: AnthropicOutputDetails | UnsetType = UNSET
        if reasoning is not UNSET:
            details = AnthropicOutputDetails(reasoning.reasoning_tokens)
        created, uncached = 0, usage.prompt_tokens - cached
        return cls(uncached, usage.completion_tokens, cached, created, details)


class TextContent(msgspec.Struct, frozen=True, tag="text"):
    text: str


class ThinkingContent(msgspec.Struct, frozen=True, tag="thinking"):
    thinking: str
    signature: str


class ToolUseContent(msgspec.Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw  # an object


Content = TextContent | ThinkingContent | ToolUseContent


class MessageResponse(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    """A whole response, or the one that ``message_start`` begins."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    baton: Explanation | UnsetType = UNSET


class MessageStart(msgspec.Struct, frozen=True, tag="message_start"):
    message: MessageResponse


class BlockStart(msgspec.Struct, frozen=True, tag="content_block_start"):
    index: int
    content_block: Content


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta"):
    thinking: str


class InputDelta(msgspec.Struct, frozen=True, tag="input_json_delta"):
    partial_json: str


class SignatureDelta(msgspec.Struct, frozen=True, tag="signature_delta"):
    signature: str


class BlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | InputDelta | SignatureDelta


class BlockStop(msgspec.Struct, frozen=True, tag="content_block_stop"):
    index: int


class MessageEnd(msgspec.Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta"):
    """The end of the message. ``usage`` holds totals."""

    delta: MessageEnd
    usage: MessageUsage
    baton: Explanation | UnsetType = UNSET


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop"):
    pass


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
EVENT_NAMES: dict[type[Event], bytes] = {
    kind: str(kind.__struct_config__.tag).encode()
    for kind in (MessageStart, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop)
}
