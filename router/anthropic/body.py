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
from router.openai.bodies.chat_body import ChatBody, ChatDialect, parse_chat, rename_error
from router.openai.bodies.field_types import Integer, StopStrings
from router.openai.bodies.parsing import check_sizes, to_api_error
from router.openai.bodies.unknown_fields import unknown_names

_PROMPT_FIELDS = {"messages", "system"}
_CONTINUE = "continue_final_message"
_COUNTED = ("add_generation_prompt", "add_special_tokens", _CONTINUE, "truncate_prompt_tokens")
"""Fields of a chat that change its prompt."""

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
    """The fields that the prompt is made of."""

    model: str | None = None
    messages: InputMessages
    system: SystemBlocks = Field(default_factory=list)
    tools: ToolDefinitions = Field(default_factory=list)
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(without_nulls)] = None
    thinking: Annotated[Thinking | None, BeforeValidator(without_nulls)] = None
    output_config: Annotated[OutputConfig | None, BeforeValidator(without_nulls)] = None
    output_format: Annotated[JsonFormat | None, BeforeValidator(without_nulls)] = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=64)


class MessagesBody(PromptBody):
    max_tokens: Integer = Field(ge=1, lt=2**31)
    stop_sequences: StopStrings = ()


MESSAGES_FIELDS = ChatDialect(
    own=MessagesBody.model_fields,
    renamed={
        "max_completion_tokens": "max_tokens",
        "n_predict": "max_tokens",
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    },
    refused={"container": (), "mcp_servers": ([],), "stop": ([],)},
    without_effect={
        *("cache_control", "context_management", "diagnostics", "fallbacks", "inference_geo"),
        *("metadata", "safeguards", "speed"),
    },
)


@dataclass(frozen=True)
class MessagesRequest:
    """A checked request. ``long_names``: see ``tools.long_names``."""

    chat: ChatBody
    long_names: Mapping[str, str]
    ignored: tuple[str, ...]
    names: Mapping[str, str]  # field of the chat -> the one that was sent

    @property
    def generation(self) -> ChatBody:
        return self.chat

    @property
    def model(self) -> str | None:
        return self.chat.model

    def rename(self, error: ApiError) -> ApiError:
        """Return an error about the chat with the names of this dialect's fields."""
        return _own_error(error, self.names)


def parse_messages(raw: Mapping[str, Any]) -> MessagesRequest:
    """Return the request. Raises ApiError (400) for the first mistake."""
    fields = MESSAGES_FIELDS.chat_fields(raw)
    body = _parse(raw, MessagesBody)
    fields["max_completion_tokens"] = body.max_tokens
    fields["stop"] = list(body.stop_sequences) or None
    return _request(raw, body, fields)


def parse_count(raw: Mapping[str, Any]) -> MessagesRequest:
    """Return the request whose prompt is to be counted. Raises ApiError (400)."""
    fields = MESSAGES_FIELDS.chat_fields(raw)
    body = _parse(raw, PromptBody)
    return _request(raw, body, {name: fields[name] for name in _COUNTED if name in fields})


Model = TypeVar("Model", bound=PromptBody)


def _parse(raw: Mapping[str, Any], model: type[Model]) -> Model:
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
    raw: Mapping[str, Any], body: PromptBody, passed: Mapping[str, Any]
) -> MessagesRequest:
    """``passed``: fields of the chat that the body does not have."""
    messages = chat_messages(system_text(body.system), body.messages, ToolDefaults(body.tools))
    chat = {
        **passed,
        "model": body.model,
        "messages": messages,
        "response_format": _response_format(body),
        **_tool_fields(body),
        **_reasoning_fields(body),
    }
    names = dict[str, str]()
    if body.thinking is not None and body.thinking.budget_tokens is not None:
        names["thinking_token_budget"] = "thinking.budget_tokens"
    if _begins_answer(messages[-1]) and not {"add_generation_prompt", _CONTINUE} & passed.keys():
        chat[_CONTINUE] = True
        names[_CONTINUE] = "messages"
    unknown = unknown_names(raw, MESSAGES_FIELDS.known)
    try:
        parsed = parse_chat(chat)
    except ApiError as error:
        raise _own_error(error, names) from None
    return MessagesRequest(parsed, long_names(body.tools), unknown, names)


def _begins_answer(last: Mapping[str, Any]) -> bool:
    """Return whether the answer continues the last message of a chat, as it does in Anthropic's
    API. Raises ApiError (400) for a text whose end the model would not have written."""
    text = last["content"] if last["role"] == "assistant" and "tool_calls" not in last else ""
    if text[-1:].isspace():
        message = "messages: the answer continues the last text, which must not end with a space"
        raise invalid(f"{message} or a line break", "messages")
    return bool(text)


def _own_error(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return the error of a chat with the names of fields as they were sent; ``names``: those of
    this request only."""

    def tool_path(found: re.Match[str]) -> str:
        return f"{found[1]}.{found[2].replace('parameters', 'input_schema')}"

    def rename(text: str) -> str:
        for name, sent in names.items():
            text = text.replace(name, sent)
        return MESSAGES_FIELDS.rename(_TOOL_FIELD.sub(tool_path, text))

    return rename_error(error, rename)


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
        if thinking.type == "enabled" and thinking.budget_tokens is not None:
            fields["thinking_token_budget"] = thinking.budget_tokens
    fields["chat_template_kwargs"] = kwargs or None
    return fields
