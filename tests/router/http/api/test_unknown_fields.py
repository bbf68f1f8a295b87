"""Unknown fields of a body are ignored and named, or refused, as the configuration says."""

from __future__ import annotations

from typing import Any

import pytest

from router.openai.bodies.unknown_fields import ignored_headers, unknown_names
from tests.router.conftest import MODEL, Cluster, Start
from tests.router.fake_worker import outputs

HI = [{"role": "user", "content": "hi"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 2}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
    ("/v1/responses/input_tokens", {"input": "hi"}),
    ("/v1/messages", {"messages": HI, "max_tokens": 2}),
    ("/v1/messages/count_tokens", {"messages": HI}),
    ("/tokenize", {"prompt": "hi"}),
    ("/tokenize", {"messages": HI}),
    ("/detokenize", {"tokens": [70]}),
]


async def post(cluster: Cluster, path: str, body: dict[str, Any]) -> Any:
    return await cluster.client.post(path, json={"model": MODEL, **body})


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_unknown_fields_are_ignored_and_named(
    start: Start, path: str, body: dict[str, Any]
) -> None:
    cluster = await start(outputs())
    unknown = {"max_tokns": 5, "x\r\ny": 1, "n" * 100: 1, "absent": None}
    response = await post(cluster, path, {**body, **unknown})
    assert response.status_code == 200, response.text
    assert response.headers["x-baton-ignored"] == f"max_tokns, x??y, {'n' * 64}"
    assert "x-baton-ignored" not in (await post(cluster, path, body)).headers


@pytest.mark.parametrize(("path", "body"), BODIES[:3])
async def test_streams_name_them_too(start: Start, path: str, body: dict[str, Any]) -> None:
    cluster = await start(outputs())
    response = await post(cluster, path, {**body, "stream": True, "frobnicate": 1})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-baton-ignored"] == "frobnicate"


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_unknown_fields_are_refused_by_configuration(
    start: Start, path: str, body: dict[str, Any]
) -> None:
    cluster = await start(outputs(), unknown_fields="refuse")
    assert (await post(cluster, path, body)).status_code == 200
    response = await post(cluster, path, {**body, "modle": "x"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert "unknown parameter 'modle'; did you mean 'model'?" in error["message"]
    if "messages" not in path:  # Anthropic's errors have neither
        assert (error["param"], error["code"]) == ("modle", "unknown_parameter")


async def test_the_document_says_whether_unknown_fields_are_taken(start: Start) -> None:
    for setting, taken in (("ignore", True), ("refuse", False)):
        cluster = await start(outputs(), unknown_fields=setting)
        document = (await cluster.client.get("/openapi.json")).json()
        body = document["components"]["schemas"]["ChatBody"]
        assert body["additionalProperties"] is taken


def test_the_header_is_bounded() -> None:
    names = unknown_names({f"{i}" * 100: 1 for i in range(10_000)}, ())
    [(_, value)] = ignored_headers(names).items()
    assert len(names) == 32
    assert len(value) == 32 * 64 + 31 * 2
    assert ignored_headers(()) == {}
    assert ignored_headers(("", "é\n,")) == {"x-baton-ignored": "?, ???"}
