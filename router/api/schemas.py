"""JSON schemas of bodies and responses, from the types that check and write them."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel

from router.api.chat_body import ChatBody
from router.api.completion_body import CompletionBody
from router.api.unsupported import OF_CHATS, OF_COMPLETIONS, Neutral
from router.wire_json import Chat, ChatChunk, Completion, ModelCard, ModelList

Schema = dict[str, Any]
REF = "#/components/schemas/"

_BOUNDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
}
ERROR: Schema = {
    "title": "Error",
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
        }
    },
    "required": ["error"],
    "additionalProperties": False,
}


def components(model_id: str) -> dict[str, Schema]:
    """By name: ``CompletionBody``, ``ChatBody``, ``Completion``, ... and ``Error``."""
    answers = (Completion, Chat, ChatChunk, ModelCard, ModelList)
    _, found = msgspec.json.schema_components(answers, ref_template=REF + "{name}")
    bodies: tuple[tuple[type[BaseModel], Neutral], ...] = (
        (CompletionBody, OF_COMPLETIONS),
        (ChatBody, OF_CHATS),
    )
    for model, neutral in bodies:
        body = model.model_json_schema(ref_template=f"{REF}{model.__name__}.{{model}}")
        for name, inner in body.pop("$defs", {}).items():
            found[f"{model.__name__}.{name}"] = inner
        found[model.__name__] = _body(body, neutral, model_id)
    found["Error"] = ERROR
    return found


def _body(schema: Schema, neutral: Neutral, model_id: str) -> Schema:
    """``null`` is the default; what is not supported is taken where it changes nothing."""
    required = schema["required"]
    given = {name: _spelled(inner) for name, inner in schema["properties"].items()}
    properties = {
        name: inner if name in required else _or_null(inner) for name, inner in given.items()
    }
    properties["model"] = {"type": "string", "enum": [model_id]}
    for name, values in neutral.items():
        properties[name] = {"enum": [*values, None]}
    return {**schema, "properties": properties}


def _spelled(schema: Schema) -> Schema:
    """Bounds as JSON schema has them: pydantic leaves its own names in optional integers."""
    named = {_BOUNDS.get(name, name): value for name, value in schema.items()}
    if "anyOf" in named:
        named["anyOf"] = [_spelled(inner) for inner in named["anyOf"]]
    return named


def _or_null(schema: Schema) -> Schema:
    if {"type": "null"} in schema.get("anyOf", ()):
        return schema
    apart = {k: v for k, v in schema.items() if k not in ("default", "title", "description")}
    about = {k: v for k, v in schema.items() if k not in apart}
    return {"anyOf": [apart, {"type": "null"}], **about}
