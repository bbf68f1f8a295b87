"""The messages of a chat request, and their form for chat templates.

Only text is supported: a part of another kind is refused by its name. ``null`` counts as absent,
because clients send answers back with their empty fields. Unknown fields of a message are ignored,
as they are labels of other servers (``id``, ``cache_control``, ``reasoning_details``).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
)

from router.openai.bodies.field_types import (
    FunctionName,
    field_error,
    list_alternatives,
    show_value,
)

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_CALLS = 128
_CALL_CHARS = 64  # what an empty call counts: it takes time, too
ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = {"text": "text", "refusal": "refusal"}  # kind of a part -> where its text is
_TEXT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "maxItems": MAX_PARTS,
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
        {"type": "null"},
    ]
}


def _check_text(value: Any) -> str:
    """Return a string, or the texts of an array of parts, one per line."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise field_error(f"must be a string or an array of text parts, not {show_value(value)}")
    if len(value) > MAX_PARTS:
        raise field_error(f"must hold at most {MAX_PARTS} parts, not {len(value)}")
    return "\n".join(_text_of(place, part) for place, part in enumerate(value))


def _text_of(place: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise field_error(f'[{place}] must be a part such as {{"type": "text", "text": "..."}}')
    if kind not in _TEXT_PARTS:
        raise field_error(
            f"[{place}] is of type {show_value(kind)}; this server takes text only",
            "unsupported_value",
        )
    key = _TEXT_PARTS[kind]
    if not isinstance(part.get(key), str):
        raise field_error(f"[{place}].{key} must be a string, not {show_value(part.get(key))}")
    text: str = part[key]
    return text


def _without_nulls(value: Any) -> Any:
    """Leave out nulls, but for a content that is null: it is empty, not missing."""
    if not isinstance(value, dict):
        return value
    given = {name: inner for name, inner in value.items() if inner is not None}
    if "content" in value:
        given.setdefault("content", "")
    return given


def _refuse_field(value: Any) -> None:
    raise field_error(
        f"is not supported, but is {show_value(value)}: leave it out", "unsupported_parameter"
    )


NotSupported = Annotated[None, PlainValidator(_refuse_field), WithJsonSchema({"type": "null"})]
Text = Annotated[str, PlainValidator(_check_text), WithJsonSchema(_TEXT_SCHEMA)]
Participant = Annotated[str, Field(pattern=r"^[^\s<|\\/>]{1,64}$")]  # OpenAI's own pattern


class _OpenModel(BaseModel):
    """Base class of the objects in a message, whose unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class _Message(_OpenModel):
    name: Participant | None = None


class SystemMessage(_Message):
    role: Literal["system", "developer"]
    content: Text


class UserMessage(_Message):
    role: Literal["user"]
    content: Text


class CalledFunction(_OpenModel):
    name: FunctionName
    arguments: str


class MessageToolCall(_OpenModel):
    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(_Message):
    role: Literal["assistant"]
    content: Text | None = None
    refusal: str | None = None
    reasoning: str | None = None  # for templates that show earlier reasoning
    reasoning_content: str | None = None  # the same, by DeepSeek's name
    tool_calls: list[MessageToolCall] | None = Field(None, max_length=MAX_CALLS, fail_fast=True)
    audio: NotSupported = None
    function_call: NotSupported = None


class ToolMessage(_Message):
    role: Literal["tool"]
    content: Text
    tool_call_id: str = Field(min_length=1, max_length=256)


def _role_tag(value: Any) -> str | None:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    role = "system" if role == "developer" else role
    return f"={role}" if role in ROLES else None


Message = Annotated[
    Annotated[SystemMessage, Tag("=system")]
    | Annotated[UserMessage, Tag("=user")]
    | Annotated[AssistantMessage, Tag("=assistant")]
    | Annotated[ToolMessage, Tag("=tool")],
    Discriminator(
        _role_tag,
        custom_error_type="baton",
        custom_error_message="{message}",
        custom_error_context={
            "message": f"must be an object with a role: {list_alternatives(ROLES)}",
            "code": "invalid_value",
            "tag": "role",
        },
    ),
    BeforeValidator(_without_nulls),
]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def message_chars(message: Message) -> int:
    """Return the characters of the message's texts, which dominate the time to render it. Nothing
    that a client may send in large numbers is left out: this bounds the work on the event loop."""
    characters = len(message.content or "") + len(message.name or "")
    if isinstance(message, ToolMessage):
        characters += len(message.tool_call_id)
    if isinstance(message, AssistantMessage):
        characters += len(message.refusal or "")
        characters += len(message.reasoning or "") + len(message.reasoning_content or "")
        characters += sum(map(_call_chars, message.tool_calls or ()))
    return characters


def _call_chars(call: MessageToolCall) -> int:
    function = call.function
    return _CALL_CHARS + len(call.id) + len(function.name) + len(function.arguments)


def to_template_message(
    message: Message, *, developer: bool, text_arguments: bool = False
) -> dict[str, Any]:
    """Return a message as chat templates expect it.

    ``developer``: whether the template knows that role; otherwise it becomes ``system``. Arguments
    of earlier calls are parsed where they are objects, and a template writes them as JSON again;
    with ``text_arguments`` they stay text, for a template that joins them to other text.
    """
    role = "system" if message.role == "developer" and not developer else message.role
    out: dict[str, Any] = {"role": role, "content": _content(message)}
    if message.name is not None:
        out["name"] = message.name
    if isinstance(message, ToolMessage):
        out["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        reasoning = message.reasoning or message.reasoning_content
        if reasoning is not None:  # some templates read the one name, some the other
            out["reasoning"] = out["reasoning_content"] = reasoning
        if message.tool_calls:
            out["tool_calls"] = [_call(call, text_arguments) for call in message.tool_calls]
    return out


def _content(message: Message) -> str:
    if isinstance(message, AssistantMessage):
        return message.content or message.refusal or ""
    return message.content


def _call(call: MessageToolCall, text_arguments: bool) -> dict[str, Any]:
    given = call.function.arguments
    if not given.strip():  # as some clients write a call without arguments
        given = "{}"
    arguments = given if text_arguments else _arguments(given)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(text: str) -> Any:
    """Return the JSON object in ``text``, or the text itself where it is something else."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
