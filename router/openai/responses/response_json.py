"""The JSON types of ``/v1/responses``: the response object and the items of its output."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from router.generation.explain import Explanation
from router.openai.answers.wire_json import TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class ReasoningTextPart(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputTextPart(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class EventTopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float


class EventLogprob(msgspec.Struct, frozen=True):
    """A token in the events of a text, which have no bytes, unlike the finished text."""

    token: str
    logprob: float
    top_logprobs: list[EventTopLogprob]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    summary: list[Any] = []
    content: list[ReasoningTextPart] = []
    encrypted_content: None = None
    status: ItemStatus


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    content: list[OutputTextPart] = []
    status: ItemStatus


class FunctionCallItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"
):
    """A call. ``name`` is the bare name; ``namespace`` is that of the tool, if it has one."""

    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str  # JSON
    status: ItemStatus


class CustomCallItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"
):
    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str
    status: ItemStatus


class SearchCallItem(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_search_call"
):
    id: str
    call_id: str
    execution: Literal["client"] = "client"
    arguments: Any
    status: ItemStatus


OutputItem = ReasoningItem | MessageItem | FunctionCallItem | CustomCallItem | SearchCallItem


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """A response at one moment. Below ``usage`` stand the fields that repeat the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    model: str
    output: list[OutputItem] = []
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] = {}
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: dict[str, Any] | None = None
    store: Literal[False] = False
    temperature: float | None = None
    text: dict[str, Any] = {}
    tool_choice: Any = "auto"
    tools: list[Any] = []
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: Literal["disabled"] = "disabled"
    baton: Explanation | UnsetType = UNSET


class InputTokens(msgspec.Struct, frozen=True):
    """The number of tokens in the prompt that a request would have."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"
