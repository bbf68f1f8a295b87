"""The id of a request, from its header to workers, logs and the response; a router that fails."""

from __future__ import annotations

import logging

import pytest

from protocol.requests import MAX_ID_CHARS
from tests.router.conftest import MODEL, Start
from tests.router.errors import check
from tests.router.fake_worker import outputs, silent

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
PAGE = {"origin": "https://chat.example"}


def body_of(path: str) -> dict[str, object]:
    if path == "/v1/completions":
        return {"model": MODEL, "prompt": "hi", "max_tokens": 2}
    if path == "/v1/responses":
        return {"model": MODEL, "input": "hi", "max_output_tokens": 2}
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.mark.parametrize("path", PATHS)
async def test_the_id_of_the_client_reaches_the_worker(start: Start, path: str) -> None:
    cluster = await start(outputs())
    given = {"x-request-id": "my-id"}
    for _ in range(2):  # clients may repeat an id: a worker's must not
        reply = await cluster.client.post(path, json=body_of(path), headers=given)
        assert (reply.status_code, reply.headers["x-request-id"]) == (200, "my-id")
    ids = [submit.request.id for submit in cluster.workers[0].requests]
    assert len(set(ids)) == 2
    assert all(name.startswith("my-id/") for name in ids)
    assert reply.json()["id"] in ids[-1]


async def test_an_id_of_the_router_is_a_part_of_the_id_of_the_response(start: Start) -> None:
    cluster = await start(outputs())
    reply = await cluster.post(prompt="hi", max_tokens=2)
    assert reply.json()["id"] == f"cmpl-{reply.headers['x-request-id']}"
    assert cluster.workers[0].requests[0].request.id == f"{reply.json()['id']}.1"


async def test_the_longest_id_fits_the_worker(start: Start) -> None:
    cluster = await start(outputs(error_after=1))
    await cluster.add(outputs())
    await cluster.attached(2)
    body = {"model": MODEL, "prompt": ["hi"] * 16, "n": 8, "max_tokens": 2}
    given = {"x-request-id": "x" * 128}
    reply = await cluster.client.post("/v1/completions", json=body, headers=given)
    assert reply.status_code == 200, reply.text
    ids = [s.request.id for worker in cluster.workers for s in worker.requests]
    assert all(name.startswith("x" * 128 + "/cmpl-") for name in ids)
    assert max(map(len, ids)) < MAX_ID_CHARS - 16


async def test_the_log_names_the_id_of_the_client(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = await start(outputs(error_after=1), outputs(error_after=1))
    await cluster.client.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": "hi", "max_tokens": 9},
        headers={"x-request-id": "my-id"},
    )
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert told and all(text.startswith("request my-id/cmpl-") for text in told)


async def test_anthropics_clients_find_the_id_where_they_look(start: Start) -> None:
    cluster = await start(outputs())
    headers = {"anthropic-version": "2023-06-01", "x-request-id": "my-id"}
    for body, status in ((body_of("/v1/messages"), 200), ({}, 400)):
        reply = await cluster.client.post("/v1/messages", json=body, headers=headers)
        assert (reply.status_code, reply.headers.get_list("request-id")) == (status, ["my-id"])


async def test_a_failure_of_the_router_has_an_id_and_can_be_read_by_pages(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = await start(silent, cors_origins=(PAGE["origin"],))

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("router.http.app.openapi_document", fails)
    headers = {**PAGE, "x-request-id": "my-id"}
    reply = await cluster.client.get("/openapi.json", headers=headers)
    check(reply, 500, None, "internal_error", "the router failed on this request")
    assert reply.headers["x-request-id"] == "my-id"
    assert reply.headers["access-control-allow-origin"] == PAGE["origin"]
    assert "request my-id, GET '/openapi.json', failed" in caplog.text
