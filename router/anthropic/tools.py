"""The tools of ``/v1/messages`` become those of a chat.

A tool with a ``type`` and without an ``input_schema`` (``web_search_20250305``) is one that
Anthropic's servers run, or whose schema only Anthropic's models know. Baton cannot offer it: it is
dropped, and refused only where ``tool_choice`` forces it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from router.anthropic.blocks import MAX_NAME_CHARS, TOOL_NAME, LenientModel, without_nulls
from router.common.errors import invalid
from router.openai.bodies.tools import MAX_TOOLS

_CHAT_NAME_CHARS = 64
_DIGEST_CHARS = 8


class ToolDefinition(LenientModel):
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


def _is_server_tool(tool: Any) -> bool:
    if not isinstance(tool, dict) or "input_schema" in tool:
        return False
    return tool.get("type") not in (None, "custom")


def _without_server_tools(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [tool for tool in value if not _is_server_tool(tool)]


ToolDefinitions = Annotated[
    list[Annotated[ToolDefinition, BeforeValidator(without_nulls)]],
    Field(max_length=MAX_TOOLS, fail_fast=True),
    BeforeValidator(_without_server_tools),
]


class ToolChoice(LenientModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, max_length=MAX_NAME_CHARS)
    disable_parallel_tool_use: bool = False


def short_name(name: str) -> str:
    """Return the name of a tool in a chat, which has at most 64 characters. The same name always
    becomes the same one: prompts of one conversation must not differ."""
    if len(name) <= _CHAT_NAME_CHARS:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST_CHARS]
    return f"{name[: _CHAT_NAME_CHARS - _DIGEST_CHARS - 1]}_{digest}"


def long_names(tools: Sequence[ToolDefinition]) -> dict[str, str]:
    """Return the names that ``short_name`` has changed: name in the chat -> the client's."""
    return {short_name(t.name): t.name for t in tools if len(t.name) > _CHAT_NAME_CHARS}


class ToolDefaults:
    """The optional arguments of each tool that have a default. One instance stands for one request.

    Claude Code sends a call back with arguments that the model has left out: before the others,
    with their defaults. A prompt with them would not begin with what the model has written.
    """

    def __init__(self, tools: Sequence[ToolDefinition]) -> None:
        self._schemas = {tool.name: tool.input_schema for tool in tools}
        self._known: dict[str, tuple[dict[str, Any], dict[str, int]]] = {}

    def as_written(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call without the leading ones that equal their default,
        although another argument comes before them in the schema."""
        defaults, order = self._of_tool(name)
        if not defaults:
            return given
        first = min(order.get(key, len(order)) for key in given) if given else 0
        kept = dict(given)
        for key, value in given.items():
            inserted = key in defaults and order[key] > first
            if not inserted or type(defaults[key]) is not type(value) or defaults[key] != value:
                break
            del kept[key]
        return kept

    def _of_tool(self, name: str) -> tuple[dict[str, Any], dict[str, int]]:
        """Return the defaults of a tool, and the places of its arguments in the schema."""
        if name not in self._known:
            schema = self._schemas.get(name, {})
            properties, required = schema.get("properties"), schema.get("required")
            properties = properties if isinstance(properties, dict) else {}
            needed = (
                {n for n in required if isinstance(n, str)} if isinstance(required, list) else ()
            )
            defaults = {
                key: value["default"]
                for key, value in properties.items()
                if key not in needed and isinstance(value, dict) and _is_plain(value.get("default"))
            }
            self._known[name] = defaults, {key: place for place, key in enumerate(properties)}
        return self._known[name]


def _is_plain(default: Any) -> bool:
    """Is this a default that is compared quickly, however many calls there are?"""
    return isinstance(default, bool | int | float) or (
        isinstance(default, str) and len(default) <= MAX_NAME_CHARS
    )


def chat_tools(tools: Sequence[ToolDefinition]) -> list[dict[str, Any]]:
    """Return the tools as clients of chats send them."""
    return [
        {
            "type": "function",
            "function": {
                "name": short_name(tool.name),
                "description": tool.description,
                "parameters": tool.input_schema,
                "strict": tool.strict,
            },
        }
        for tool in tools
    ]


def chat_tool_choice(choice: ToolChoice, tools: Sequence[ToolDefinition]) -> Any:
    """Return ``tool_choice`` as clients of chats send it; None: without tools, where none is
    forced. Raises ApiError (400) for a forced tool that is not offered."""
    if choice.type == "tool":
        if choice.name not in {tool.name for tool in tools}:
            raise invalid(
                f"tool_choice.name {choice.name!r} is not among the tools that this server can"
                " offer: tools with an input_schema",
                "tool_choice.name",
            )
        return {"type": "function", "function": {"name": short_name(choice.name)}}
    if not tools:
        if choice.type == "any":
            raise invalid(
                "tool_choice 'any' is only allowed with a tool that has an input_schema",
                "tool_choice",
            )
        return None
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
