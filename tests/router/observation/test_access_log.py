"""One line for each HTTP request, whatever became of it."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from protocol.errors import StartupError
from router.observation.access_log import AccessLine, open_access_log
from tests.router.conftest import MODEL, Cluster, Start, served, until
from tests.router.fake_worker import outputs, silent


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


async def logged(path: Path, count: int) -> list[dict[str, Any]]:
    await until(lambda: len(path.read_text().splitlines()) >= count)
    found = lines(path)
    assert len(found) == count
    return found


async def test_a_request_is_one_line(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    cluster = await start(outputs(cached=1), access_log=str(path))
    headers = {"x-request-id": "my-id", "authorization": "Bearer sk-secret"}
    body = {"model": MODEL, "prompt": "a private prompt", "max_tokens": 3, "stream": True}
    reply = await cluster.client.post("/v1/completions?key=sk-secret", json=body, headers=headers)
    (line,) = await logged(path, 1)
    id_ = json.loads(reply.text.split("\n\n")[0].removeprefix("data: "))["id"]
    expected = {
        "request_id": "my-id",
        "client": "127.0.0.1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "tenant": "default",
        "outcome": "ok",
        "response_id": id_,
        "cached_tokens": 1,
        "output_tokens": 3,
        "attempts": 1,
    }
    assert {name: line[name] for name in expected} == expected
    assert set(line) == {*expected, "time", "seconds", "prompt_tokens", "ttft_s"}
    assert 0 < line["ttft_s"] <= line["seconds"]
    assert "private" not in path.read_text() and "secret" not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


async def test_refused_and_small_requests_are_lines_too(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    cluster = await start(access_log=str(path), cors_origins=("*",))
    asked = {"model": MODEL, "prompt": "hi"}
    await cluster.client.get("/health")
    await cluster.client.get("/" + "x" * 999)
    await cluster.client.post("/v1/completions", json={})
    await cluster.client.post("/v1/completions", json=asked)
    await cluster.client.options(
        "/v1/models", headers={"origin": "https://a", "access-control-request-method": "GET"}
    )
    found = [
        (line["status"], line.get("tenant"), line.get("outcome")) for line in await logged(path, 5)
    ]
    assert found == [
        (200, None, None),
        (404, None, None),
        (400, "default", None),
        (503, "default", None),
        (204, None, None),
    ]
    assert lines(path)[1]["path"] == "/" + "x" * 199


async def test_a_refusal_that_is_a_whole_stream_has_its_status(
    start: Start, tmp_path: Path
) -> None:
    path = tmp_path / "access.jsonl"
    cluster = await start(outputs(), access_log=str(path))
    body = {"model": MODEL, "input": "hi " * 5000, "stream": True}
    reply = await cluster.client.post("/v1/responses", json=body)
    assert "response.failed" in reply.text
    (line,) = await logged(path, 1)
    assert (line["status"], line["outcome"], line["tenant"]) == (200, "400", "default")
    assert "response_id" not in line


async def test_errors_inside_a_stream_and_failures_are_told(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "access.jsonl"
    cluster = await start(outputs(error_after=2, retryable=False), access_log=str(path))
    await cluster.post(prompt="hi", max_tokens=9, stream=True)

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("router.http.app.openapi_document", fails)
    await cluster.client.get("/openapi.json")
    streamed, failed = await logged(path, 2)
    assert (streamed["status"], streamed["outcome"], streamed["output_tokens"]) == (200, "500", 2)
    assert failed["status"] == 500


async def test_a_client_that_hangs_up_is_a_line(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    cluster = await start(silent, access_log=str(path))

    async def hang_up(cluster: Cluster, url: str) -> None:
        async with httpx.AsyncClient() as client:
            body = {"model": MODEL, "prompt": "hi"}
            asking = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
            await until(lambda: len(cluster.workers[0].requests) == 1)
            asking.cancel()

    async with served(cluster.app) as url:
        await hang_up(cluster, url)
        (line,) = await logged(path, 1)
    assert (line["status"], line["outcome"], line["output_tokens"]) == (0, "cancelled", 0)
    assert "ttft_s" not in line


async def test_a_full_disk_stops_no_request(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "access.jsonl"
    cluster = await start(outputs(), access_log=str(path))
    real = os.write

    def write(file: int, data: bytes) -> int:
        if b'"path"' in data:
            raise OSError(28, "No space left on device")
        return real(file, data)

    monkeypatch.setattr("router.common.json_lines_log.os.write", write)
    for _ in range(3):
        assert (await cluster.post(prompt="hi", max_tokens=1)).status_code == 200
    labels = {"model": MODEL, "role": "router", "export": "access_log"}
    registry = cluster.app.state.router.metrics.registry
    name = "baton_observation_dropped_requests_total"
    await until(lambda: registry.get_sample_value(name, labels) == 3)
    assert path.read_text() == ""


async def test_nothing_is_recorded_by_default(start: Start) -> None:
    cluster = await start(outputs())
    assert cluster.app.state.router.observer is None
    assert "baton_observation" not in cluster.app.state.router.metrics_page().decode()


def test_files_are_rotated_as_the_usage_log_is(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    log = open_access_log(str(path))
    log._file._limit = 300
    log.start()
    line = AccessLine(
        time=1.0, request_id="id", client="::1", method="GET", path="/", status=200, seconds=0.1
    )
    for number in range(24):
        log.write(msgspec.structs.replace(line, request_id=str(number)))
    log.close()
    names = sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".lock")
    assert names == ["access.jsonl", *(f"access.jsonl.{number}" for number in range(1, 6))]
    assert lines(path)[-1]["request_id"] == "23"


def test_a_file_that_cannot_be_opened_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"router\.access_log: cannot write"):
        open_access_log(str(tmp_path / "none" / "access.jsonl"))
