"""The body of ``POST /v1/responses``: checked, then turned into a chat.

    raw --OpenFields--> checked --items, tools--> ChatBody (the one internal request)

What a stateless server can honour is honoured, what has no effect on the result is ignored, and
what changes the result and is not supported is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from protocol.sampling_params import MAX_LOGPROBS
from router.common.errors import ApiError, invalid
from router.openai.bodies.chat_body import ChatBody, ChatDialect, parse_chat, rename_error
from router.openai.bodies.field_types import Integer, StrictModel, show_value
from router.openai.bodies.parsing import parse_body
from router.openai.bodies.unknown_fields import unknown_names
from router.openai.responses.body_schema import INPUT, TOOL_CHOICE, TOOLS
from router.openai.responses.items import collect_tools, read_items
from router.openai.responses.tools import ToolSet, tool_choice_for_chat

OUTPUT_LOGPROBS = "message.output_text.logprobs"
"""The only entry of ``include`` that has an effect; the others are about hosted tools."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_UNKNOWN_EFFORT = "high"  # names differ by model, and clients send new ones


class OpenFields(StrictModel):
    """The fields that are this dialect's own. Items and tools are checked by ``items`` and
    ``tools``, which name the wrong one."""

    input: Annotated[Any, WithJsonSchema(INPUT)]
    instructions: str | None = None
    tools: Annotated[list[Any] | None, WithJsonSchema(TOOLS)] = None
    tool_choice: Annotated[Any, WithJsonSchema(TOOL_CHOICE)] = None
    parallel_tool_calls: bool = True
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    max_output_tokens: Integer | None = Field(None, ge=1, lt=2**31)
    include: list[Any] | None = None
    top_logprobs: Integer = Field(0, ge=0, le=MAX_LOGPROBS)

    @property
    def shows_logprobs(self) -> bool:
        return OUTPUT_LOGPROBS in (self.include or ())


RESPONSES_FIELDS = ChatDialect(
    own=OpenFields.model_fields,
    renamed={
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "n_predict": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "logprobs": "include",
    },
    refused={
        "background": (False,),
        "conversation": (),
        "previous_response_id": (),
        "truncation": ("disabled",),
    },
    without_effect={
        *("access_programs", "client_metadata", "context_management", "image"),
        *("max_tool_calls", "prompt_cache_options"),
    },
)


@dataclass(frozen=True)
class ResponsesBody:
    """A checked request. ``generation`` is what is generated; the rest is shown in the response."""

    generation: ChatBody
    fields: OpenFields
    tools: ToolSet
    paths: tuple[str, ...]  # of the item of each message
    ignored: tuple[str, ...] = ()  # names of unknown parameters

    @property
    def model(self) -> str | None:
        return self.generation.model

    def rename(self, error: ApiError) -> ApiError:
        """Return an error about the chat with the names of this dialect's fields."""
        return _own_error(error, self.tools, self.paths)


def parse_responses(raw: Mapping[str, Any]) -> ResponsesBody:
    """Return the checked body. Raises ApiError (400) for the first mistake."""
    passed = RESPONSES_FIELDS.chat_fields(raw)
    fields = parse_body(raw, OpenFields, {})
    try:
        tools, found = collect_tools(fields.tools, fields.input)
        messages, paths = read_items(fields.input, fields.instructions, tools, found)
        chat = passed | _own_chat_fields(fields, tools, messages)
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    try:
        body = parse_chat(chat)
    except ApiError as error:
        raise _own_error(error, tools, paths) from None
    unknown = unknown_names(raw, RESPONSES_FIELDS.known)
    return ResponsesBody(body, fields, tools, tuple(paths), unknown)


def _own_chat_fields(
    fields: OpenFields, tools: ToolSet, messages: list[dict[str, Any]]
) -> dict[str, Any]:
    choice = tool_choice_for_chat(fields.tool_choice, tools, sent=bool(fields.tools))
    return {
        "messages": messages,
        "tools": tools.for_chat or None,
        "tool_choice": choice,
        "parallel_tool_calls": fields.parallel_tool_calls,
        "max_completion_tokens": fields.max_output_tokens,
        "response_format": _response_format(fields.text),
        "reasoning_effort": reasoning_effort(fields.reasoning),
        "logprobs": fields.shows_logprobs,
        "top_logprobs": fields.top_logprobs if fields.shows_logprobs else None,
    }


def _response_format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return ``text.format`` as ``response_format`` of a chat."""
    wanted = (text or {}).get("format")
    if wanted is None:
        return None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "json_schema":
        names = ("name", "description", "schema", "strict")
        schema = {name: wanted[name] for name in names if name in wanted}
        return {"type": "json_schema", "json_schema": {"name": "output", **schema}}
    if kind not in ("text", "json_object"):
        message = "text.format must have the type 'text', 'json_object' or 'json_schema', not"
        raise invalid(f"{message} {show_value(wanted)}", "text.format", "invalid_value")
    return {"type": kind}


def reasoning_effort(reasoning: dict[str, Any] | None) -> str | None:
    """Return the effort in the terms of chats; None: none is sent."""
    effort = (reasoning or {}).get("effort")
    if effort is None or effort in EFFORTS:
        return effort
    return _UNKNOWN_EFFORT


_MESSAGE = re.compile(r"\bmessages\[(\d{1,9})\]")
_TOOL = re.compile(r"\btools\[(\d{1,9})\](\.function)?")


def _own_error(error: ApiError, tools: ToolSet, paths: Sequence[str]) -> ApiError:
    """Return the error with the names of fields that the client sent. A message's index becomes
    that of its first item."""

    def item_path(found: re.Match[str]) -> str:
        index = int(found[1])
        return paths[index] if index < len(paths) else "input"

    def tool_path(found: re.Match[str]) -> str:
        index = int(found[1])
        return tools.path_of(index) if index < len(tools) else "tools"

    def rename(text: str) -> str:
        return RESPONSES_FIELDS.rename(_TOOL.sub(tool_path, _MESSAGE.sub(item_path, text)))

    return rename_error(error, rename)
