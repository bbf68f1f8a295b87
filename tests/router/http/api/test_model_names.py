"""The names that clients give the model: none, its own, and aliases."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.conftest import MODEL, Start
from tests.router.fake_worker import outputs

HI = [{"role": "user", "content": "hi"}]
PATHS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 2}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
    ("/v1/messages", {"messages": HI, "max_tokens": 2}),
]


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_each_name_is_echoed_and_shares_the_prefix_cache(
    start: Start, path: str, body: dict[str, Any]
) -> None:
    cluster = await start(outputs(), model_aliases=("claude-small", "gpt-5"))
    names = {None: MODEL, "": MODEL, MODEL: MODEL, "claude-small": "claude-small", "gpt-5": "gpt-5"}
    for name, shown in names.items():
        response = await cluster.client.post(path, json={**body, "model": name})
        assert response.status_code == 200, response.text
        assert response.json()["model"] == shown
    assert (await cluster.client.post(path, json=body)).json()["model"] == MODEL
    other = await cluster.client.post(path, json={**body, "model": "gpt-6"})
    assert other.status_code == 404
    roots = {submit.request.cache_root for submit in cluster.workers[0].requests}
    assert len(roots) == 1


async def test_the_list_of_models_has_aliases_with_the_models_own_name(start: Start) -> None:
    cluster = await start(outputs(), model_aliases=("claude-small", MODEL))
    cards = (await cluster.client.get("/v1/models")).json()["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        (MODEL, MODEL, None),
        ("claude-small", MODEL, None),
    ]
    card = (await cluster.client.get("/v1/models/claude-small")).json()
    assert (card["id"], card["root"], card["max_model_len"]) == ("claude-small", MODEL, 4096)
    headers = {"anthropic-version": "2023-06-01"}
    page = (await cluster.client.get("/v1/models", headers=headers)).json()
    assert [entry["id"] for entry in page["data"]] == [MODEL, "claude-small"]
    document = (await cluster.client.get("/openapi.json")).json()
    names = document["components"]["schemas"]["ChatBody"]["properties"]["model"]["enum"]
    assert names == [MODEL, "claude-small", None]
