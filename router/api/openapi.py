"""The server's OpenAPI document: what it takes, and all that it may answer."""

from __future__ import annotations

from typing import Any

from router.api.schemas import REF, Schema, components

_STATUS = {
    "400": "The request is wrong; `param` names the field",
    "401": "No API key, or one that is not known",
    "404": "No such model, or no such path",
    "405": "The path does not take that method",
    "408": "The body did not come in time",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "429": "Too much work is here already",
    "431": "The headers are too large",
    "500": "The server failed on the request",
    "503": "No worker can take the request now",
    "504": "The answer did not come in time",
}
_OF_EVERY = ("400", "401", "405", "408", "413", "431", "500")
_OF_WORK = ("404", "415", "429", "503", "504")
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
        "name": "x-baton-ttft-deadline-ms",
        "in": "header",
        "description": "Refuse the request at once if its first token is predicted to come later",
        "schema": {"type": "number", "exclusiveMinimum": 0, "examples": [2000]},
    },
]


def document(model_id: str, *, keys: bool) -> Schema:
    """``keys``: whether requests need one."""
    found: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": "1", "description": "An OpenAI-compatible server"},
        "paths": _paths(),
        "components": {"schemas": components(model_id)},
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
        "/v1/completions": {"post": _work("completion", "CompletionBody", "Completion")},
        "/v1/chat/completions": {"post": _work("chat", "ChatBody", "Chat", "ChatChunk")},
        "/v1/models": {"get": _look("models", _ref("ModelList"))},
        "/v1/models/{name}": {
            "get": {"parameters": [_in_path("name")], **_look("model", _ref("ModelCard"), "404")}
        },
        "/health": {"get": {**_look("health", any_object), "security": []}},
        "/ready": {"get": {**_look("ready", any_object, "503"), "security": []}},
        "/metrics": {"get": _look("metrics", text, kind="text/plain")},
        "/sd": {"get": _look("sd", objects)},
        "/openapi.json": {"get": _look("openapi", any_object)},
        "/ui": {"get": {**_look("ui", text, kind="text/html"), "security": []}},
        "/ui/overview": {"get": _look("overview", any_object)},
        "/ui/{file}": {"get": _part()},
    }


def _in_path(name: str) -> Schema:
    schema: Schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _part() -> dict[str, Any]:
    """A file of the page, of whatever kind."""
    found = _look("ui_file", {"type": "string"}, "404", kind="*/*")
    return {"parameters": [_in_path("file")], **found, "security": []}


def _ref(name: str) -> Schema:
    return {"$ref": REF + name}


def _look(
    name: str, answer: Schema, *errors: str, kind: str = "application/json"
) -> dict[str, Any]:
    ok = {"description": "OK", "content": {kind: {"schema": answer}}}
    return {"operationId": name, "responses": {"200": ok, **_errors(*_OF_EVERY, *errors)}}


def _work(name: str, body: str, answer: str, chunk: str | None = None) -> dict[str, Any]:
    events = f"Events with a `{chunk or answer}` each, then `[DONE]`; or an `Error`, and no more"
    ok = {
        "description": "Whole, or with `stream` as events",
        "content": {
            "application/json": {"schema": _ref(answer)},
            "text/event-stream": {"schema": _event(events)},
        },
    }
    return {
        "operationId": name,
        "parameters": _HEADERS,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref(body)}},
        },
        "responses": {"200": ok, **_errors(*_OF_EVERY, *_OF_WORK)},
    }


def _event(description: str) -> Schema:
    """One of them, in the terms of server-sent events."""
    data = {"type": "string", "description": description}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _errors(*statuses: str) -> dict[str, Schema]:
    content = {"application/json": {"schema": _ref("Error")}}
    return {s: {"description": _STATUS[s], "content": content} for s in sorted(statuses)}
