"""The server's OpenAPI document: its paths, with the schemas of ``components``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.openapi.components import REF, Schema, schema_components

_TOKENIZE_BODIES = ("TokenizeTextBody", "TokenizeContentBody", "TokenizeChatBody")
_STATUS = {
    "400": "The request is invalid; `param` names the field",
    "401": "No API key, or an unknown one",
    "403": "The API key does not have the scope that this path needs",
    "404": "No such model, or no such path",
    "405": "The path does not accept that method",
    "408": "The body was not received in time",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "429": "The server is overloaded, or the tenant's limit is reached",
    "431": "The headers are too large",
    "500": "The server failed on the request",
    "503": "No worker can serve the request now",
    "504": "The answer was not ready in time",
    "529": "The server is overloaded",
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
        "description": "Refuse the request at once if its first token is predicted to be later;"
        " a deadline that is later than the server's own changes nothing",
        "schema": {"type": "number", "exclusiveMinimum": 0, "examples": [2000]},
    },
]


def openapi_document(
    model_names: Sequence[str], *, keys: bool = False, closed: bool = False
) -> Schema:
    """Return the document; ``keys``: whether requests need an API key; ``closed``: whether unknown
    fields are refused."""
    found: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": "1",
            "description": "A server that is compatible with OpenAI's API and with Anthropic's",
        },
        "paths": _paths(),
        "components": {"schemas": schema_components(model_names, closed=closed)},
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
        "/tokenize": {"post": _token_call("tokenize", *_TOKENIZE_BODIES)},
        "/detokenize": {"post": _token_call("detokenize", "DetokenizeBody")},
        "/version": {"get": _lookup("version", any_object)},
        "/load": {"get": _lookup("load", any_object)},
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
        "/": {"get": _redirect("home")},
        "/ui": {"get": {**_lookup("ui", text, kind="text/html"), "security": []}},
        "/ui/overview": {"get": _lookup("overview", any_object, "403")},
        "/ui/{file}": {"get": _ui_file()},
    }


def _token_call(name: str, *bodies: str) -> dict[str, Any]:
    """Return the operation that turns a prompt into tokens, or back."""
    answer = "TokenizedPrompt" if name == "tokenize" else "DetokenizedPrompt"
    schema: Schema = {"anyOf": [_ref(body) for body in bodies]}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        **_lookup(name, _ref(answer), *_GENERATION_ERRORS),
    }


def _redirect(name: str) -> dict[str, Any]:
    found = {"307": {"description": "The page is at `location`"}}
    return {
        "operationId": name,
        "responses": {**found, **_errors("Error", *_COMMON_ERRORS)},
        "security": [],
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
