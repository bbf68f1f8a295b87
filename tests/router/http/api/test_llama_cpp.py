"""Parameters by which llama.cpp bounds and changes an output."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.conftest import MODEL, Cluster, Start
from tests.router.fake_worker import outputs

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
COMPLETION = ("/v1/completions", {"prompt": "hi"})


async def post(cluster: Cluster, to: tuple[str, dict[str, Any]], **fields: Any) -> Any:
    path, body = to
    return await cluster.client.post(path, json={"model": MODEL, **body, **fields})


@pytest.mark.parametrize("to", [CHAT, COMPLETION])
async def test_n_predict_bounds_the_output(start: Start, to: Any) -> None:
    cluster = await start(outputs())
    for fields in ({}, {"max_tokens": 3}, {"max_tokens": None}):
        reply = await post(cluster, to, n_predict=3, **fields)
        assert reply.json()["usage"]["completion_tokens"] == 3, reply.text
        assert "x-baton-ignored" not in reply.headers
    reply = await post(cluster, to, n_predict=-1, max_tokens=2)
    assert reply.json()["usage"]["completion_tokens"] == 2


async def test_n_predict_of_minus_one_is_no_bound_in_chats(start: Start) -> None:
    cluster = await start(outputs(together=5000))
    reply = await post(cluster, CHAT, n_predict=-1)
    assert reply.json()["usage"]["total_tokens"] == 4096
    reply = await post(cluster, COMPLETION, n_predict=0, echo=True)
    assert reply.json()["choices"][0]["text"] == "hi"


@pytest.mark.parametrize(
    ("to", "fields", "says"),
    [
        (CHAT, {"n_predict": 0}, "must be at least 1, not 0"),
        (CHAT, {"n_predict": 3, "max_completion_tokens": 4}, "send one of them"),
        (CHAT, {"n_predict": "3"}, "must be an integer"),
        (CHAT, {"n_predict": -2}, "must be at least -1"),
        (COMPLETION, {"n_predict": -1}, "must be at least 1, not -1"),
        (COMPLETION, {"n_predict": 0}, "must be at least 1, not 0"),
        (COMPLETION, {"n_predict": 3, "max_tokens": 4}, "send one of them"),
        (COMPLETION, {"n_predict": 2**40}, "must be below"),
        (CHAT, {"mirostat": 2}, "is not supported"),
        (COMPLETION, {"mirostat": 1}, "is not supported"),
    ],
)
async def test_what_is_refused(start: Start, to: Any, fields: dict[str, Any], says: str) -> None:
    cluster = await start(outputs())
    reply = await post(cluster, to, **fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == next(iter(fields)) and says in error["message"]
    assert (await post(cluster, to, mirostat=0, max_tokens=1)).status_code == 200
