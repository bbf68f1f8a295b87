"""The server's own document: what it says of bodies and answers is so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from router.common.errors import invalid
from router.openapi.document import openapi_document
from tests.router.conftest import MODEL, Start
from tests.router.fake_worker import outputs
from tests.router.http.api.test_chat import SAY_HI, WEATHER

DOCUMENT = openapi_document([MODEL])


def check(name: str, value: Any) -> None:
    """``value`` is what the document calls so."""
    Draft202012Validator({**DOCUMENT, "$ref": f"#/components/schemas/{name}"}).validate(value)


def test_every_schema_is_one_and_every_reference_leads_somewhere() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    references: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            references.update([value["$ref"]] if isinstance(value.get("$ref"), str) else [])
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(DOCUMENT)
    assert references <= {f"#/components/schemas/{name}" for name in schemas}
    assert json.loads(json.dumps(DOCUMENT)) == DOCUMENT


async def test_every_route_is_in_it(start: Start) -> None:
    cluster = await start()
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in cluster.app.routes
        for method in route.methods  # type: ignore[attr-defined]
        if method != "HEAD"
    }
    told = {(path, method) for path, item in DOCUMENT["paths"].items() for method in item}
    assert told == routes
    assert (await cluster.client.get("/openapi.json")).json() == DOCUMENT


async def test_keys(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-1: acme")
    keys.chmod(0o600)
    cluster = await start(api_keys=str(keys))
    assert (await cluster.client.get("/openapi.json")).status_code == 401
    response = await cluster.client.get("/openapi.json", headers={"authorization": "Bearer sk-1"})
    assert response.json()["security"] == [{"key": []}]


COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "hi"},
    {"prompt": [70, 71], "n": 2, "logprobs": 2, "echo": True, "max_tokens": 3},
    {"prompt": ["a", [70]], "best_of": 2, "prompt_logprobs": 1, "return_token_ids": True},
    {"prompt": "x", "stop": ["a"], "logit_bias": {"5": 1.5}, "seed": -1, "suffix": ""},
    {"prompt": "x", "stop": None, "temperature": None, "bad_words": [], "suffix": None},
    {"prompt": "x", "response_format": {"type": "json_object"}, "guided_json": None},
]
CHATS: list[dict[str, Any]] = [
    {"messages": SAY_HI, "max_tokens": 3},
    {"messages": SAY_HI, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "n": 2},
    {"messages": SAY_HI, "max_tokens": 3, "tools": [WEATHER], "tool_choice": "auto"},
    {"messages": [{"role": "system", "content": [{"type": "text", "text": "x"}]}], "max_tokens": 1},
    {"messages": SAY_HI, "max_tokens": 3, "store": True, "metadata": {"a": "b"}, "new_one": 1},
    {"messages": [{"role": "user", "content": None, "id": "m1"}], "max_tokens": 1, "model": None},
]


@pytest.mark.parametrize("body", COMPLETIONS)
async def test_completions(start: Start, body: dict[str, Any]) -> None:
    check("CompletionBody", {"model": MODEL, **body})
    cluster = await start(outputs())
    headers = {"x-baton-explain": "1"}
    response = await cluster.client.post(
        "/v1/completions", json={"model": MODEL, **body}, headers=headers
    )
    assert response.status_code == 200, response.text
    check("Completion", response.json())


@pytest.mark.parametrize("body", CHATS)
async def test_chats(start: Start, body: dict[str, Any]) -> None:
    check("ChatBody", {"model": MODEL, **body})
    cluster = await start(outputs())
    response = await cluster.chat(**body)
    assert response.status_code == 200, response.text
    check("Chat", response.json())
    streamed = await cluster.chat(**body, stream=True)
    events = streamed.text.removesuffix("\n\n").split("\n\n")
    assert events.pop() == "data: [DONE]"
    for event in events:
        check("ChatChunk", json.loads(event.removeprefix("data: ")))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("CompletionBody", {"prompt": ""}),
        ("CompletionBody", {"prompt": [1, -1]}),
        ("CompletionBody", {"prompt": None}),
        ("CompletionBody", {"n": 65}),
        ("CompletionBody", {"suffix": "x"}),
        ("CompletionBody", {"messages": SAY_HI}),
        ("CompletionBody", {"logit_bias": {"05": 1}}),
        ("CompletionBody", {"stop": ["a"] * 17}),
        ("CompletionBody", {"model": "other"}),
        ("ChatBody", {"prompt": "x"}),
        ("ChatBody", {"messages": []}),
        ("ChatBody", {"messages": [{"role": "boss", "content": "x"}]}),
        ("ChatBody", {"store": 1}),
        ("ChatBody", {"response_format": {"type": "xml"}}),
    ],
)
async def test_what_is_refused_is_no_body(start: Start, name: str, change: dict[str, Any]) -> None:
    good: dict[str, Any] = {"prompt": "x"} if name == "CompletionBody" else {"messages": SAY_HI}
    check(name, {"model": MODEL, **good})
    with pytest.raises(ValidationError):
        check(name, {"model": MODEL, **good, **change})
    cluster = await start(outputs())
    path = "/v1/completions" if name == "CompletionBody" else "/v1/chat/completions"
    response = await cluster.client.post(path, json={"model": MODEL, **good, **change})
    assert response.status_code in (400, 404)
    check("Error", response.json())


def test_errors() -> None:
    check("Error", json.loads(invalid("m", "p", "c").body()))
    with pytest.raises(ValidationError):
        check("Error", {"error": {"message": "m"}})
