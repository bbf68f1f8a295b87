"""Hostile grammars over HTTP: two tenants, one of them hostile, and a router that ends."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec

from protocol.registry.directory import ModelInfo
from router.settings import RouterSettings
from tests.router.conftest import MODEL, Cluster, running
from tests.router.fake_worker import outputs

BOUND_S = 8.0


def wanted(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


async def post(cluster: Cluster, key: str, **body: Any) -> httpx.Response:
    return await cluster.client.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": "x", **body},
        headers={"authorization": f"Bearer {key}"},
    )


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def test_one_tenants_hostile_grammars_are_its_own_trouble(
    settings: RouterSettings, model_info: ModelInfo, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("sk-bad: bad\nsk-good: good\n")
    keys.chmod(0o600)
    settings = msgspec.structs.replace(settings, api_keys=str(keys))
    start = time.perf_counter()
    async with running(settings, model_info, outputs()) as cluster:
        gbnf = "root ::= " + "\n" * 16_370
        form = wanted({"type": "integer", "multipleOf": 9_999_991})
        hostile = [
            asyncio.create_task(post(cluster, "sk-bad", guided_grammar=gbnf)),
            asyncio.create_task(post(cluster, "sk-bad", response_format=form)),
        ]
        await asyncio.sleep(0.2)
        plain = time.perf_counter()
        assert (await post(cluster, "sk-good")).status_code == 200
        assert time.perf_counter() - plain < 1.0, "the event loop is free"
        for name in "abc":
            good = wanted({"type": "object", "properties": {name: {"type": "integer"}}})
            answer = await post(cluster, "sk-good", response_format=good)
            assert answer.status_code == 200, answer.text
        assert not hostile[1].done(), "nobody waited for them"
        answers = await asyncio.gather(*hostile)
        told = [(a.status_code, a.json()["error"]["param"]) for a in answers]
        schema = "response_format.json_schema.schema"
        assert told == [(400, "guided_grammar"), (400, schema)]
        after = wanted({"type": "object", "properties": {"after": {}}})
        assert (await post(cluster, "sk-bad", response_format=after)).status_code == 200
        pids = cluster.app.state.router.formats.checker.pool.pids
        assert pids and alive(pids) == pids
    assert not alive(pids)
    assert time.perf_counter() - start < BOUND_S
