"""JSON schemas of the fields that ``items`` and ``tools`` check, for the OpenAPI document.

They are no stricter than those checks: a body that does not fit them is refused.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}


def _object(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": required}


def _text_or(*parts: Schema) -> Schema:
    """Return the schema of a text, or an array of parts."""
    return {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": list(parts)}}]}


_TEXT_PART = _object(
    ["type", "text"], type={"enum": ["input_text", "output_text", "text"]}, text=_TEXT
)
_REFUSAL_PART = _object(["type", "refusal"], type={"const": "refusal"}, refusal=_TEXT)
_LEFT_OUT_PART = _object(["type"], type={"enum": ["input_image", "input_file"]})
_CALL_ID: Schema = {"type": "string", "minLength": 1, "maxLength": 256}
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 1024}
OTHER_ITEMS = [
    "reasoning",
    "tool_search_call",
    "tool_search_output",
    "additional_tools",
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "local_shell_call",
    "local_shell_call_output",
    "compaction",
    "compaction_summary",
    "context_compaction",
    "configuration_update",
    "ghost_snapshot",
]
_ITEM: Schema = {
    "anyOf": [
        _object(
            ["role", "content"],
            type={"const": "message"},
            role={"enum": ["user", "assistant", "system", "developer"]},
            content=_text_or(_TEXT_PART, _REFUSAL_PART),
        ),
        _object(
            ["type", "call_id", "name", "arguments"],
            type={"const": "function_call"},
            call_id=_CALL_ID,
            name=_NAME,
            arguments=_TEXT,
        ),
        _object(
            ["type", "call_id", "name", "input"],
            type={"const": "custom_tool_call"},
            call_id=_CALL_ID,
            name=_NAME,
            input=_TEXT,
        ),
        _object(
            ["type", "call_id", "output"],
            type={"enum": ["function_call_output", "custom_tool_call_output"]},
            call_id=_CALL_ID,
            output=_text_or(_TEXT_PART, _REFUSAL_PART, _LEFT_OUT_PART),
        ),
        _object(["type"], type={"enum": OTHER_ITEMS}),
    ]
}
INPUT: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _ITEM, "minItems": 1}]}

_NAMED_TOOL = _object(["type", "name"], type={"enum": ["function", "custom"]}, name=_NAME)
TOOLS: Schema = {
    "type": "array",
    "items": {
        "anyOf": [
            _NAMED_TOOL,
            _object(
                ["type", "name", "tools"],
                type={"const": "namespace"},
                name=_NAME,
                tools={"type": "array", "items": {"type": "object"}},
            ),
            _object(["type"], type={"type": "string"}),
        ]
    },
}
TOOL_CHOICE: Schema = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        _object(["type"], type={"enum": ["function", "custom", "tool_search", "allowed_tools"]}),
    ]
}
