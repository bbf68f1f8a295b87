"""The schemas of the OpenAPI document: bodies, responses and errors by name.

``schema_components`` makes them from the types that check bodies and write responses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import BaseModel

from router.anthropic.body import MESSAGES_FIELDS, MessagesBody, PromptBody
from router.anthropic.wire import MessageResponse, TokenCount
from router.openai.answers.wire_json import Chat, ChatChunk, Completion, ModelCard, ModelList
from router.openai.bodies.chat_body import ChatBody
from router.openai.bodies.completion_body import CompletionBody
from router.openai.bodies.parsing import CHAT_UNSUPPORTED, COMPLETION_UNSUPPORTED, NeutralValues
from router.openai.bodies.tokenize_body import (
    CONTENT_UNSUPPORTED,
    TOKENIZE_CHAT_UNSUPPORTED,
    DetokenizeBody,
    DetokenizedPrompt,
    TokenizeChatBody,
    TokenizeContentBody,
    TokenizedPrompt,
    TokenizeTextBody,
)
from router.openai.responses.body import RESPONSES_FIELDS, OpenFields
from router.openai.responses.response_json import InputTokens, ResponseObject

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

MESSAGE_ERROR: Schema = {
    "title": "MessageError",
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
            "additionalProperties": False,
        },
        "request_id": {"type": ["string", "null"]},
    },
    "required": ["type", "error", "request_id"],
    "additionalProperties": False,
}

_CLOSED = (
    *(ChatBody, CompletionBody, DetokenizeBody),
    *(TokenizeTextBody, TokenizeContentBody, TokenizeChatBody),
)
"""Bodies whose fields are all in the document."""

_PUBLISHED_NAMES = {
    "AttemptOutcome": "Observed",
    "AttemptReport": "Tried",
    "CandidateReport": "Candidate",
    "MessageToolCall": "ToolCall",
    "NamedFunction": "FunctionByName",
    "ToolFunction": "Function",
}
"""Class name -> name of its component. Published names stay when a class is renamed."""


def schema_components(model_names: Sequence[str], *, closed: bool = False) -> dict[str, Schema]:
    """Return JSON schemas by name: ``CompletionBody``, ``ChatBody``, ``Completion``, ``Error``,
    ..."""
    answers = (
        *(Completion, Chat, ChatChunk, ModelCard, ModelList),
        *(ResponseObject, InputTokens, MessageResponse, TokenCount),
        *(TokenizedPrompt, DetokenizedPrompt),
    )
    _, found = msgspec.json.schema_components(answers, ref_template=REF + "{name}")
    bodies: tuple[tuple[type[BaseModel], NeutralValues], ...] = (
        (CompletionBody, COMPLETION_UNSUPPORTED),
        (ChatBody, CHAT_UNSUPPORTED),
        (RESPONSES_FIELDS.documented(OpenFields, "ResponsesBody"), RESPONSES_FIELDS.refused),
        (MESSAGES_FIELDS.documented(MessagesBody, "MessagesBody"), MESSAGES_FIELDS.refused),
        (PromptBody, {}),
        (TokenizeTextBody, {}),
        (TokenizeContentBody, CONTENT_UNSUPPORTED),
        (TokenizeChatBody, TOKENIZE_CHAT_UNSUPPORTED),
        (DetokenizeBody, {}),
    )
    for model, neutral in bodies:
        body = model.model_json_schema(ref_template=f"{REF}{model.__name__}.{{model}}")
        for name, inner in body.pop("$defs", {}).items():
            found[f"{model.__name__}.{name}"] = inner
        found[model.__name__] = _body_schema(body, neutral, model_names)
        found[model.__name__]["additionalProperties"] = not (closed and model in _CLOSED)
    found["Error"] = ERROR
    found["MessageError"] = MESSAGE_ERROR
    text = json.dumps(found)
    for name, published in _PUBLISHED_NAMES.items():
        text = re.sub(rf'(?<=[/."]){name}(?=")', published, text)
    schemas: dict[str, Schema] = json.loads(text)
    return schemas


def _body_schema(schema: Schema, neutral: NeutralValues, model_names: Sequence[str]) -> Schema:
    """Allow ``null`` for the default, and unsupported parameters with their neutral values."""
    required = schema["required"]
    given = {name: _rename_bounds(inner) for name, inner in schema["properties"].items()}
    properties = {
        name: inner if name in required else _or_null(inner) for name, inner in given.items()
    }
    properties["model"] = {"enum": [*model_names, None]}
    for name, values in neutral.items():
        properties[name] = {"enum": [*values, None]}
    return {**schema, "properties": properties}


def _rename_bounds(schema: Schema) -> Schema:
    """Use JSON schema's names of bounds: pydantic keeps its own in optional integers."""
    named = {_BOUNDS.get(name, name): value for name, value in schema.items()}
    if "anyOf" in named:
        named["anyOf"] = [_rename_bounds(inner) for inner in named["anyOf"]]
    return named


def _or_null(schema: Schema) -> Schema:
    if {"type": "null"} in schema.get("anyOf", ()):
        return schema
    apart = {k: v for k, v in schema.items() if k not in ("default", "title", "description")}
    about = {k: v for k, v in schema.items() if k not in apart}
    return {"anyOf": [apart, {"type": "null"}], **about}
