"""The bodies of ``POST /v1/messages`` and ``/v1/messages/count_tokens``, and the chats they become.

``parse_messages`` and ``parse_count`` are called by the routes. Unknown fields are ignored, as
clients send the newest ones of Anthropic's API; what changes the answer and cannot be done here is
refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError

from protocol.requests import PRIORITIES
from router.anthropic.blocks import (
    InputMessages,
    LenientModel,
    SystemBlocks,
    without_nulls,
)
from router.anthropic.conversation import chat_messages, system_text
from router.anthropic.tools import (
    ToolChoice,
    ToolDefaults,
    ToolDefinitions,
    chat_tool_choice,
    chat_tools,
    long_names,
)
from router.common.errors import ApiError, invalid
from router.openai.bodies.chat_body import ChatBody
from router.openai.bodies.field_types import Integer, StopStrings
from router.openai.bodies.parsing import check_sizes, to_api_error
from router.openai.bodies.unknown_fields import unknown_names

_REFUSED = {
    "mcp_servers": "this server calls no other one: send the tools of MCP servers as tools",
    "container": "this server runs no code",
}
_WITHOUT_EFFECT = {
    "cache_control",
    "context_management",
    "diagnostics",
    "fallbacks",
    "inference_geo",
    "metadata",
    "safeguards",
    "service_tier",
    "speed",
}
_PROMPT_FIELDS = {"messages", "system"}
_CHAT_FIELDS = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format.json_schema.schema": "output_config.format.schema",
}
"""Names of the same field in a chat, and here."""

_TOOL_FIELD = re.compile(r"(tools\[\d+\])\.function\.(name|description|parameters)")


class Thinking(LenientModel):
    """``display`` is ignored: reasoning is always returned, and a client that sends it back keeps
    the prompt that is cached."""

    type: Literal["enabled", "adaptive", "disabled", "between_tools"]
    budget_tokens: Integer | None = Field(None, ge=1, lt=2**31)


class JsonFormat(LenientModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(LenientModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Annotated[JsonFormat | None, BeforeValidator(without_nulls)] = None


class PromptBody(LenientModel):
    """The fields that the prompt is made of. ``cache_salt``, ``chat_template_kwargs``, ``priority``
    and ``prompt_cache_key`` mean what they mean in a chat."""

    model: str | None = None
    messages: InputMessages
    system: SystemBlocks = Field(default_factory=list)
    tools: ToolDefinitions = Field(default_factory=list)
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(without_nulls)] = None
    thinking: Annotated[Thinking | None, BeforeValidator(without_nulls)] = None
    output_config: Annotated[OutputConfig | None, BeforeValidator(without_nulls)] = None
    output_format: Annotated[JsonFormat | None, BeforeValidator(without_nulls)] = None
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=64)
    priority: Integer = Field(0, ge=PRIORITIES[0], le=PRIORITIES[1])
    prompt_cache_key: str | None = Field(None, max_length=512)


class MessagesBody(PromptBody):
    max_tokens: Integer = Field(ge=1, lt=2**31)
    stop_sequences: StopStrings = ()
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: Integer | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, gt=0, le=10, allow_inf_nan=False)


@dataclass(frozen=True)
class MessagesRequest:
    """A checked request. ``long_names``: see ``tools.long_names``."""

    chat: ChatBody
    long_names: Mapping[str, str]
    ignored: tuple[str, ...]

    @property
    def generation(self) -> ChatBody:
        return self.chat


def parse_messages(raw: Mapping[str, Any]) -> MessagesRequest:
    """Return the request. Raises ApiError (400) for the first mistake."""
    body = _parse(raw, MessagesBody)
    options = {
        "max_completion_tokens": body.max_tokens,
        "stop": list(body.stop_sequences) or None,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
    }
    return _request(raw, body, options)


def parse_count(raw: Mapping[str, Any]) -> MessagesRequest:
    """Return the request whose prompt is to be counted. Raises ApiError (400)."""
    return _request(raw, _parse(raw, PromptBody), {})


Model = TypeVar("Model", bound=PromptBody)


def _parse(raw: Mapping[str, Any], model: type[Model]) -> Model:
    for name, why in _REFUSED.items():
        if raw.get(name):
            message = f"{name} is not supported ({why}): leave it out"
            raise invalid(message, name, "unsupported_parameter")
    known = {
        name: value
        for name, value in raw.items()
        if name in model.model_fields and value is not None
    }
    check_sizes({name: value for name, value in known.items() if name not in _PROMPT_FIELDS})
    try:
        return model.model_validate(known)
    except ValidationError as error:
        raise to_api_error(error, model) from None
    except RecursionError:
        raise invalid("the body is nested too deeply") from None


def _request(
    raw: Mapping[str, Any], body: PromptBody, options: Mapping[str, Any]
) -> MessagesRequest:
    fields = {
        "model": body.model,
        "messages": chat_messages(
            system_text(body.system), body.messages, ToolDefaults(body.tools)
        ),
        "response_format": _response_format(body),
        "cache_salt": body.cache_salt,
        "priority": body.priority,
        "prompt_cache_key": body.prompt_cache_key,
        **_tool_fields(body),
        **_reasoning_fields(body),
        **options,
    }
    try:
        chat = ChatBody.model_validate({k: v for k, v in fields.items() if v is not None})
    except ValidationError as error:
        raise with_own_fields(to_api_error(error, ChatBody)) from None
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    known = {*MessagesBody.model_fields, *_REFUSED, *_WITHOUT_EFFECT}
    return MessagesRequest(chat, long_names(body.tools), unknown_names(raw, known))


def with_own_fields(error: ApiError) -> ApiError:
    """Return the error of a chat with the name of the field as it was sent."""
    given = error.param or ""
    tool = _TOOL_FIELD.match(given)
    name = _CHAT_FIELDS.get(given)
    if tool:
        name = f"{tool[1]}.{tool[2].replace('parameters', 'input_schema')}"
    if name is None or error.status != 400:
        return error
    error.message = error.message.replace(given, name, 1)
    error.param = name
    return error


def _tool_fields(body: PromptBody) -> dict[str, Any]:
    choice = body.tool_choice
    fields: dict[str, Any] = {"tools": chat_tools(body.tools) or None}
    if choice is not None:
        fields["tool_choice"] = chat_tool_choice(choice, body.tools)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _response_format(body: PromptBody) -> dict[str, Any] | None:
    given = body.output_format
    if body.output_config is not None and body.output_config.format is not None:
        given = body.output_config.format
    if given is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given.schema_}}


def _reasoning_fields(body: PromptBody) -> dict[str, Any]:
    """Without ``thinking`` the template decides."""
    thinking, kwargs = body.thinking, dict(body.chat_template_kwargs or {})
    fields: dict[str, Any] = {}
    if body.output_config is not None:
        fields["reasoning_effort"] = body.output_config.effort
    if thinking is not None and thinking.type in ("disabled", "between_tools"):
        fields["reasoning_effort"] = "none"
    elif thinking is not None:
        kwargs = {"enable_thinking": True, "thinking": True, **kwargs}
        fields["thinking_token_budget"] = (
            thinking.budget_tokens if thinking.type == "enabled" else None
        )
    fields["chat_template_kwargs"] = kwargs or None
    return fields
