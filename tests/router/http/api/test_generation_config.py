"""Sampling of requests that set none: the model's ``generation_config.json``, in all dialects."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.router.conftest import Start
from tests.router.fake_worker import outputs

HI = [{"role": "user", "content": "hi"}]
GIVEN = {"temperature": 0.5, "top_p": 0.75, "top_k": 20, "min_p": 0.25, "repetition_penalty": 1.5}
PATHS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/chat/completions", {"messages": HI}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {"messages": HI, "max_tokens": 9}),
]


@pytest.fixture
def thinking_path(model_path: Path, tmp_path: Path) -> str:
    folder = tmp_path / "model"
    shutil.copytree(model_path, folder)
    config = {**GIVEN, "max_new_tokens": 7, "do_sample": True, "eos_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(config))
    return str(folder)


def sampling_of(request: Any) -> dict[str, float]:
    return {name: getattr(request.sampling, name) for name in GIVEN}


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_the_file_counts_where_the_client_sets_nothing(
    start: Start, thinking_path: str, path: str, body: dict[str, Any]
) -> None:
    cluster = await start(outputs(), model_path=thinking_path)
    asked: list[dict[str, Any]] = [
        {},
        {"temperature": 0, "top_k": 3},
        {"temperature": None, "top_p": 1.0},
    ]
    for given in asked:
        response = await cluster.client.post(path, json={**body, **given})
        assert response.status_code == 200, response.text
        assert "x-baton-ignored" not in response.headers
    got = [sampling_of(submit.request) for submit in cluster.workers[0].requests]
    assert got == [GIVEN, {**GIVEN, "temperature": 0.0, "top_k": 3}, {**GIVEN, "top_p": 1.0}]


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_it_is_left_out_by_configuration(
    start: Start, thinking_path: str, path: str, body: dict[str, Any]
) -> None:
    cluster = await start(outputs(), model_path=thinking_path, generation_config="none")
    bound = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    await cluster.client.post(path, json={**body, bound: 9})
    [submit] = cluster.workers[0].requests
    assert submit.request.sampling.temperature == submit.request.sampling.top_p == 1.0
    assert submit.request.sampling.top_k == 0


async def test_the_longest_output_counts_where_the_client_sets_no_bound(
    start: Start, thinking_path: str
) -> None:
    cluster = await start(outputs(), model_path=thinking_path)
    bodies: list[dict[str, Any]] = [{}, {"max_tokens": 9}, {"min_tokens": 8}]
    for body in bodies:
        await cluster.chat(**body)
    reply = await cluster.client.post("/v1/responses", json={"input": "hi"})
    assert [submit.request.sampling.max_tokens for submit in cluster.workers[0].requests] == [
        7,
        9,
        8,
        7,
    ]
    shown = reply.json()
    assert (shown["temperature"], shown["top_p"]) == (0.5, 0.75)
