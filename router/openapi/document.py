"""The server's OpenAPI document, made from the types that check bodies and write responses."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from pydantic import BaseModel

from router.anthropic.body import MessagesBody, PromptBody
from router.anthropic.wire import MessageResponse, TokenCount
from router.openai.answers.wire_json import Chat, ChatChunk, Completion, ModelCard, ModelList
from router.openai.bodies.generation_body import ChatBody, CompletionBody
from router.openai.bodies.parsing import CHAT_UNSUPPORTED, COMPLETION_UNSUPPORTED, NeutralValues
from router.openai.responses import body as responses_body
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

_PUBLISHED_NAMES = {
    "AttemptOutcome": "Observed",
    "AttemptReport": "Tried",
    "CandidateReport": "Candidate",
    "MessageToolCall": "ToolCall",
    "NamedFunction": "FunctionByName",
    "ToolFunction": "Function",
}
"""Class name -> name of its component. Published names stay when a class is renamed."""

_STATUS = {
    "400": "The request is wrong; `param` names the field",
    "401": "No API key, or one that is not known",
    "403": "The API key does not have the scope that this path needs",
    "404": "No such model, or no such path",
    "405": "The path does not take that method",
    "408": "The body did not come in time",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "429": "Too much work is here already, or the tenant's limit is reached",
    "431": "The headers are too large",
    "500": "The server failed on the request",
    "503": "No worker can take the request now",
    "504": "The answer did not come in time",
    "529": "Too much work is here already",
}
_EVENTS = {
    "response": "OpenAI's events of a response; the first and the last have a `ResponseObject`",
    "message": "Anthropic's events of a message; the first has a `MessageResponse`",
}
_COMMON_ERRORS = ("400", "401", "405", "408", "413", "431", "500")
_GENERATION_ERRORS = ("403", "404", "415", "429", "503", "504")
_MESSAGE_ERRORS = (*_GENERATION_ERRORS, "529")
_HEADERS: list[Schema] = [
    {
        "name": "x-baton-explain",
        "in": "header",
        "description": "1: the answer's field `baton` tells why the request went where it did",
        "schema": {"type": "string"},
    },
    {
        "name": "x-baton-timeline",
        "in": "header",
        "description": "1: `baton.timeline` tells when each step of the request was done",
        "schema": {"type": "string"},
    },
    {
        "name": "x-session-id",
        "in": "header",
        "description": "Name of a session, as `prompt_cache_key`, which goes before it",
        "schema": {"type": "string"},
    },
    {
        "name": "x-baton-ttft-deadline-ms",
        "in": "header",
        "description": "Refuse the request at once if its first token is predicted to come later;"
        " a deadline that is later than the server's own changes nothing",
        "schema": {"type": "number", "exclusiveMinimum": 0, "examples": [2000]},
    },
]


def openapi_document(model_id: str, *, keys: bool) -> Schema:
    """Return the document; ``keys``: whether requests need an API key."""
    found: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": "1",
            "description": "A server that is compatible with OpenAI's API and with Anthropic's",
        },
        "paths": _paths(),
        "components": {"schemas": schema_components(model_id)},
    }
    if keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _paths() -> dict[str, Schema]:
    any_object: Schema = {"type": "object"}
    text: Schema = {"type": "string"}
    objects: Schema = {"type": "array", "items": any_object}
    return {
        "/v1/completions": {"post": _generation("completion", "CompletionBody", "Completion")},
        "/v1/chat/completions": {"post": _generation("chat", "ChatBody", "Chat", "ChatChunk")},
        "/v1/responses": {"post": _generation("response", "ResponsesBody", "ResponseObject")},
        "/v1/responses/input_tokens": {
            "post": {
                "requestBody": _request_body("ResponsesBody"),
                **_lookup("input_tokens", _ref("InputTokens"), *_GENERATION_ERRORS),
            }
        },
        "/v1/responses/{id}": {
            method: {
                "parameters": [_in_path("id")],
                **_lookup(f"{method}_response", any_object, "404"),
            }
            for method in ("get", "delete")
        },
        "/v1/messages": {"post": _generation("message", "MessagesBody", "MessageResponse")},
        "/v1/messages/count_tokens": {
            "post": {
                "requestBody": _request_body("PromptBody"),
                **_lookup(
                    "count_tokens", _ref("TokenCount"), *_MESSAGE_ERRORS, error="MessageError"
                ),
            }
        },
        "/api/hello": {"get": {**_lookup("hello", any_object), "security": []}},
        "/v1/models": {"get": _lookup("models", _ref("ModelList"))},
        "/v1/models/{name}": {
            "get": {"parameters": [_in_path("name")], **_lookup("model", _ref("ModelCard"), "404")}
        },
        "/health": {"get": {**_lookup("health", any_object), "security": []}},
        "/ready": {"get": {**_lookup("ready", any_object, "503"), "security": []}},
        "/metrics": {"get": _lookup("metrics", text, "403", kind="text/plain")},
        "/sd": {"get": _lookup("sd", objects, "403")},
        "/openapi.json": {"get": _lookup("openapi", any_object)},
        "/ui": {"get": {**_lookup("ui", text, kind="text/html"), "security": []}},
        "/ui/overview": {"get": _lookup("overview", any_object, "403")},
        "/ui/{file}": {"get": _ui_file()},
    }


def _in_path(name: str) -> Schema:
    schema: Schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _ui_file() -> dict[str, Any]:
    """Return the operation that serves a file of the UI."""
    found = _lookup("ui_file", {"type": "string"}, "404", kind="*/*")
    return {"parameters": [_in_path("file")], **found, "security": []}


def _ref(name: str) -> Schema:
    return {"$ref": REF + name}


def _lookup(
    name: str,
    answer: Schema,
    *errors: str,
    kind: str = "application/json",
    error: str = "Error",
) -> dict[str, Any]:
    ok = {"description": "OK", "content": {kind: {"schema": answer}}}
    failures = _errors(error, *_COMMON_ERRORS, *errors)
    return {"operationId": name, "responses": {"200": ok, **failures}}


def _generation(name: str, body: str, answer: str, chunk: str | None = None) -> dict[str, Any]:
    events = _EVENTS.get(name) or (
        f"Events with a `{chunk or answer}` each, then `[DONE]`; or an `Error`, and no more"
    )
    ok = {
        "description": "Whole, or with `stream` as events",
        "content": {
            "application/json": {"schema": _ref(answer)},
            "text/event-stream": {"schema": _event(events)},
        },
    }
    if name == "message":
        failures = _errors("MessageError", *_COMMON_ERRORS, *_MESSAGE_ERRORS)
    else:
        failures = _errors("Error", *_COMMON_ERRORS, *_GENERATION_ERRORS)
    return {
        "operationId": name,
        "parameters": _HEADERS,
        "requestBody": _request_body(body),
        "responses": {"200": ok, **failures},
    }


def _request_body(name: str) -> Schema:
    return {"required": True, "content": {"application/json": {"schema": _ref(name)}}}


def _event(description: str) -> Schema:
    """Return the schema of one server-sent event."""
    data = {"type": "string", "description": description}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _errors(name: str, *statuses: str) -> dict[str, Schema]:
    content = {"application/json": {"schema": _ref(name)}}
    return {s: {"description": _STATUS[s], "content": content} for s in sorted(statuses)}


def schema_components(model_id: str) -> dict[str, Schema]:
    """Return JSON schemas by name: ``CompletionBody``, ``ChatBody``, ``Completion``, ``Error``,
    ..."""
    answers = (
        *(Completion, Chat, ChatChunk, ModelCard, ModelList),
        *(ResponseObject, InputTokens, MessageResponse, TokenCount),
    )
    _, found = msgspec.json.schema_components(answers, ref_template=REF + "{name}")
    bodies: tuple[tuple[type[BaseModel], NeutralValues], ...] = (
        (CompletionBody, COMPLETION_UNSUPPORTED),
        (ChatBody, CHAT_UNSUPPORTED),
        (responses_body.documented_model(), responses_body.REFUSED),
        (MessagesBody, {}),
        (PromptBody, {}),
    )
    for model, neutral in bodies:
        body = model.model_json_schema(ref_template=f"{REF}{model.__name__}.{{model}}")
        for name, inner in body.pop("$defs", {}).items():
            found[f"{model.__name__}.{name}"] = inner
        found[model.__name__] = _body_schema(body, neutral, model_id)
    found["ResponsesBody"]["additionalProperties"] = True
    found["Error"] = ERROR
    found["MessageError"] = MESSAGE_ERROR
    text = json.dumps(found)
    for name, published in _PUBLISHED_NAMES.items():
        text = re.sub(rf'(?<=[/."]){name}(?=")', published, text)
    schemas: dict[str, Schema] = json.loads(text)
    return schemas


def _body_schema(schema: Schema, neutral: NeutralValues, model_id: str) -> Schema:
    """Allow ``null`` for the default, and unsupported parameters with their neutral values."""
    required = schema["required"]
    given = {name: _rename_bounds(inner) for name, inner in schema["properties"].items()}
    properties = {
        name: inner if name in required else _or_null(inner) for name, inner in given.items()
    }
    properties["model"] = {"type": "string", "enum": [model_id]}
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
