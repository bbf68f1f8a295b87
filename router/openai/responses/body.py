"""The body of ``POST /v1/responses``: checked, then turned into a chat.

    raw --OpenFields--> checked --items, tools--> ChatBody (the one internal request)

What a stateless server can honour is honoured, what has no effect on the result is ignored, and
what changes the result and is not supported is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Field, WithJsonSchema, create_model

from protocol.sampling_params import MAX_LOGPROBS
from router.common.errors import ApiError, invalid
from router.openai.bodies.chat_body import ChatBody, parse_chat
from router.openai.bodies.field_types import Integer, StrictModel, show_value
from router.openai.bodies.parsing import NeutralValues, parse_body
from router.openai.bodies.unknown_fields import unknown_names
from router.openai.responses.body_schema import INPUT, TOOL_CHOICE, TOOLS
from router.openai.responses.items import collect_tools, read_items
from router.openai.responses.tools import ToolSet, tool_choice_for_chat

REFUSED: NeutralValues = {
    "background": (False,),
    "conversation": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "truncation": ("disabled",),
}
"""Parameters whose effect this server cannot give, and the values at which they have none."""

IGNORED = frozenset(
    {
        "access_programs",
        "client_metadata",
        "context_management",
        "image",
        "max_tool_calls",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    }
)
"""Parameters without effect on the result, whatever their value is."""

PASSED_ON = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "min_tokens",
    "ignore_eos",
    "stream",
    "metadata",
    "priority",
    "cache_salt",
    "prompt_cache_key",
    "chat_template_kwargs",
)
"""Parameters that mean what they mean in chats; those that OpenAI does not have are vLLM's."""

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


KNOWN = frozenset({*OpenFields.model_fields, *REFUSED, *IGNORED, *PASSED_ON})


def documented_model() -> type[BaseModel]:
    """Return a model of all parameters, for the OpenAPI document."""
    passed: dict[str, Any] = {
        name: (field.annotation, field)
        for name, field in ChatBody.model_fields.items()
        if name in PASSED_ON
    }
    return create_model("ResponsesBody", __base__=OpenFields, **passed)


@dataclass(frozen=True)
class ResponsesBody:
    """A checked request. ``generation`` is what is generated; the rest is shown in the response."""

    generation: ChatBody
    fields: OpenFields
    tools: ToolSet
    paths: tuple[str, ...]  # of the item of each message
    ignored: tuple[str, ...] = ()  # names of unknown parameters

    def rename(self, error: ApiError) -> ApiError:
        """Return an error about the chat with the names of this dialect's fields."""
        return rename_error(error, self.tools, self.paths)


def parse_responses(raw: Mapping[str, Any]) -> ResponsesBody:
    """Return the checked body. Raises ApiError (400) for the first mistake."""
    own = {name: raw[name] for name in raw if name in OpenFields.model_fields or name in REFUSED}
    fields = parse_body(own, OpenFields, REFUSED)
    try:
        tools, found = collect_tools(fields.tools, fields.input)
        messages, paths = read_items(fields.input, fields.instructions, tools, found)
        chat = _chat(raw, fields, tools, messages)
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    try:
        body = parse_chat(chat)
    except ApiError as error:
        raise rename_error(error, tools, paths) from None
    return ResponsesBody(body, fields, tools, tuple(paths), unknown_names(raw, KNOWN))


def _chat(
    raw: Mapping[str, Any], fields: OpenFields, tools: ToolSet, messages: list[dict[str, Any]]
) -> dict[str, Any]:
    chat = {name: raw[name] for name in PASSED_ON if name in raw}
    choice = tool_choice_for_chat(fields.tool_choice, tools, sent=bool(fields.tools))
    return chat | {
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


_NAMES = (
    (re.compile(r"max_completion_tokens"), "max_output_tokens"),
    (re.compile(r"response_format\.json_schema"), "text.format"),
    (re.compile(r"response_format"), "text.format"),
    (re.compile(r"reasoning_effort"), "reasoning.effort"),
)
_MESSAGE = re.compile(r"\bmessages\[(\d{1,9})\]")
_TOOL = re.compile(r"\btools\[(\d{1,9})\](\.function)?")


def rename_error(error: ApiError, tools: ToolSet, paths: list[str] | tuple[str, ...]) -> ApiError:
    """Return the error with the names of fields that the client sent. A message's index becomes
    that of its first item."""

    def item_path(found: re.Match[str]) -> str:
        index = int(found[1])
        return paths[index] if index < len(paths) else "input"

    def tool_path(found: re.Match[str]) -> str:
        index = int(found[1])
        return tools.path_of(index) if index < len(tools) else "tools"

    def rename(text: str) -> str:
        text = re.sub(r"\bmessages\b", "input", _MESSAGE.sub(item_path, text))
        text = _TOOL.sub(tool_path, text)
        for pattern, name in _NAMES:
            text = pattern.sub(name, text)
        return text

    param = error.param
    if param is None:
        return error
    renamed = rename(param)
    if renamed == param:
        return error
    # Only names in front of other messages are surely not the client's own text.
    head, gap, tail = error.message.partition(" ")
    if error.code == "context_length_exceeded":
        tail = rename(tail)
    message = rename(head) + gap + tail
    return ApiError(
        error.status,
        message,
        type=error.type,
        param=renamed,
        code=error.code,
        headers=error.headers,
    )
