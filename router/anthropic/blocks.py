"""The messages of ``/v1/messages`` as clients send them: content blocks by role.

A string stands for one text block. Unknown fields of a block (``cache_control``, ``citations``) are
ignored; unknown kinds of blocks are refused, because they hold a part of the conversation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from router.openai.bodies.field_types import field_error, list_alternatives, show_value
from router.openai.bodies.messages import MAX_MESSAGES, MAX_PARTS

MAX_ID_CHARS = 256
MAX_NAME_CHARS = 128
TOOL_NAME = rf"^[a-zA-Z0-9_-]{{1,{MAX_NAME_CHARS}}}$"

_UNSUPPORTED = {
    "image": "this server takes text only",
    "document": "this server takes text only",
    "container_upload": "this server has no files",
    "search_result": "send its text",
}
_TOOL_CHANGES = ("tool_addition", "tool_removal")


def without_nulls(value: Any) -> Any:
    """Return an object without its nulls: clients send answers back with their empty fields."""
    if not isinstance(value, dict):
        return value
    return {name: inner for name, inner in value.items() if inner is not None}


class _OrText:
    """Annotation of blocks that may be given as one string: the JSON schema says so."""

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string"}, handler(core)]}


class LenientModel(BaseModel):
    """Base class of objects whose unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Allow null for what may be left out, as ``without_nulls`` does."""
        schema = handler.resolve_ref_schema(handler(core))
        required, fields = schema.get("required", ()), schema.get("properties", {})
        for name, field in fields.items():
            if name not in required and {"type": "null"} not in field.get("anyOf", ()):
                fields[name] = {"anyOf": [field, {"type": "null"}]}
        return schema


class TextBlock(LenientModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(LenientModel):
    type: Literal["thinking"]
    thinking: str = ""


class RedactedThinkingBlock(LenientModel):
    """Encrypted reasoning of another server; it is dropped."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(LenientModel):
    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=MAX_ID_CHARS)
    name: str = Field(pattern=TOOL_NAME)
    input: dict[str, Any] = {}


class ToolReferenceBlock(LenientModel):
    """The name of a tool that a search of the client has found."""

    type: Literal["tool_reference"]
    tool_name: str = Field(max_length=MAX_NAME_CHARS)


class ToolChangeBlock(LenientModel):
    """A change of the tools that is repeated in ``tools``; it is dropped."""

    type: Literal["tool_addition", "tool_removal"]


def _as_blocks(value: Any) -> Any:
    """Return the array of blocks that a string, or the absence of content, stands for."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise field_error(f"must be a string or an array of blocks, not {show_value(value)}")
    for place, block in enumerate(value):
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind in _UNSUPPORTED:
            message = f"[{place}] is of type {kind!r}; {_UNSUPPORTED[kind]}"
            raise field_error(message, "unsupported_value")
    return value


def _tag_of(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if not isinstance(kind, str):
        return None
    return "=tool_change" if kind in _TOOL_CHANGES else f"={kind}"


def _one_of(kinds: Iterable[str]) -> Discriminator:
    return Discriminator(
        _tag_of,
        custom_error_type="baton",
        custom_error_message="{message}",
        custom_error_context={
            "message": f"must be a block with a type: {list_alternatives(kinds)}",
            "code": "invalid_value",
            "tag": "type",
        },
    )


_Text = Annotated[TextBlock, Tag("=text")]
_ToolReference = Annotated[ToolReferenceBlock, Tag("=tool_reference")]
_ResultPart = Annotated[_Text | _ToolReference, _one_of(("text", "tool_reference"))]
_ResultParts = Annotated[
    list[Annotated[_ResultPart, BeforeValidator(without_nulls)]],
    Field(max_length=MAX_PARTS, fail_fast=True),
    BeforeValidator(_as_blocks),
    _OrText(),
]


class ToolResultBlock(LenientModel):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=MAX_ID_CHARS)
    content: _ResultParts = []
    is_error: bool = False


UserBlock = Annotated[
    _Text | Annotated[ToolResultBlock, Tag("=tool_result")], _one_of(("text", "tool_result"))
]
AssistantBlock = Annotated[
    _Text
    | Annotated[ThinkingBlock, Tag("=thinking")]
    | Annotated[RedactedThinkingBlock, Tag("=redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("=tool_use")],
    _one_of(("text", "thinking", "redacted_thinking", "tool_use")),
]
SystemBlock = Annotated[
    _Text | Annotated[ToolChangeBlock, Tag("=tool_change")],
    _one_of(("text", *_TOOL_CHANGES)),
]
SystemBlocks = Annotated[
    list[Annotated[SystemBlock, BeforeValidator(without_nulls)]],
    Field(max_length=MAX_PARTS, fail_fast=True),
    BeforeValidator(_as_blocks),
    _OrText(),
]


class AnthropicUserMessage(LenientModel):
    role: Literal["user"]
    content: Annotated[
        list[Annotated[UserBlock, BeforeValidator(without_nulls)]],
        Field(max_length=MAX_PARTS, fail_fast=True),
        BeforeValidator(_as_blocks),
        _OrText(),
    ]


class AnthropicAssistantMessage(LenientModel):
    role: Literal["assistant"]
    content: Annotated[
        list[Annotated[AssistantBlock, BeforeValidator(without_nulls)]],
        Field(max_length=MAX_PARTS, fail_fast=True),
        BeforeValidator(_as_blocks),
        _OrText(),
    ]


class AnthropicSystemMessage(LenientModel):
    """An instruction in the middle of a conversation."""

    role: Literal["system"]
    content: SystemBlocks


_ROLES = ("user", "assistant", "system")


def _role_tag(value: Any) -> str | None:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return f"={role}" if role in _ROLES else None


InputMessage = Annotated[
    Annotated[AnthropicUserMessage, Tag("=user")]
    | Annotated[AnthropicAssistantMessage, Tag("=assistant")]
    | Annotated[AnthropicSystemMessage, Tag("=system")],
    Discriminator(
        _role_tag,
        custom_error_type="baton",
        custom_error_message="{message}",
        custom_error_context={
            "message": f"must be an object with a role: {list_alternatives(_ROLES)}",
            "code": "invalid_value",
            "tag": "role",
        },
    ),
]
InputMessages = Annotated[
    list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]
