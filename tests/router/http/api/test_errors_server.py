"""Errors that are not the body's: no key, no worker, no time, a worker that fails. Each has its
status until the first byte of an answer, is a frame of its own after it, and is counted."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from protocol.wire import wire_pb2 as pb
from tests.router.conftest import MODEL, Cluster, Start
from tests.router.errors import check
from tests.router.fake_worker import outputs, silent

TEXT = "/v1/completions", {"model": MODEL, "prompt": "hi", "max_tokens": 20}
CHAT = (
    "/v1/chat/completions",
    {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 20,
    },
)
both = pytest.mark.parametrize("asked", [TEXT, CHAT])
streamed = pytest.mark.parametrize("stream", [False, True])
Asked = tuple[str, dict[str, Any]]


async def ask(cluster: Cluster, asked: Asked, *, stream: bool = False, **headers: str) -> Any:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return await cluster.client.post(asked[0], json={**asked[1], "stream": stream}, headers=names)


def counted(cluster: Cluster) -> dict[str, float]:
    """Requests by how they ended."""
    page = cluster.app.state.router.metrics_page().decode()
    found = re.findall(r'^baton_requests_total{.*status="(\w+)"} (\S+)$', page, re.MULTILINE)
    return {status: float(count) for status, count in found if float(count)}


@both
async def test_no_key(start: Start, tmp_path: Path, asked: Asked) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("sk-one: acme")
    keys.chmod(0o600)
    cluster = await start(outputs(), api_keys=str(keys))
    cases = {
        "": "no API key was provided: send it as 'Authorization: Bearer YOUR_KEY'",
        "Basic sk-one": "no API key was provided",
        "Bearer": "no API key was provided",
        "Bearer sk-two": "Incorrect API key provided",
    }
    for given, says in cases.items():
        response = await ask(cluster, asked, authorization=given)
        error = check(response, 401, None, "invalid_api_key", says)
        assert response.headers["www-authenticate"] == "Bearer"
        assert "sk-" not in error["message"]
    assert counted(cluster) == {"401": 4}
    assert (await ask(cluster, asked, authorization="bearer sk-one")).status_code == 200


@both
@streamed
async def test_no_worker(start: Start, asked: Asked, stream: bool) -> None:
    cluster = await start()
    response = await ask(cluster, asked, stream=stream)
    check(response, 503, None, "no_worker", "no decode worker is connected; try again shortly")
    assert response.headers["retry-after"] == "1"
    check(await cluster.client.get("/ready"), 503, None, "no_worker", MODEL)
    assert counted(cluster) == {"503": 1}


@both
@streamed
async def test_no_time(start: Start, asked: Asked, stream: bool) -> None:
    cluster = await start(silent, first_token_timeout_s=0.1)
    response = await ask(cluster, asked, stream=stream)
    check(response, 504, None, "timeout", "the first token was not generated within 0.1 s")
    assert counted(cluster) == {"504": 1}


@both
@streamed
async def test_too_much_to_do(start: Start, asked: Asked, stream: bool) -> None:
    cluster = await start(outputs())
    response = await ask(cluster, asked, stream=stream, x_baton_ttft_deadline_ms="0.001")
    check(response, 429, None, "overloaded", "the first token is predicted to take")
    assert int(response.headers["retry-after"]) >= 1
    assert counted(cluster) == {"429": 1}


@both
@streamed
async def test_a_worker_fails_before_the_first_byte(
    start: Start, asked: Asked, stream: bool
) -> None:
    cluster = await start(outputs(error_after=0, retryable=False))
    check(await ask(cluster, asked, stream=stream), 500, None, "worker_error", "boom")
    assert counted(cluster) == {"500": 1}


async def dies(request: pb.Request) -> AsyncIterator[pb.Output]:
    """A script: three tokens, and then an end that no other worker can mend."""
    async for output in outputs(error_after=3, retryable=False, delay=0.01)(request):
        yield output


@both
async def test_a_worker_fails_after_it(start: Start, asked: Asked) -> None:
    cluster = await start(dies)
    response = await ask(cluster, asked, stream=True)
    assert response.status_code == 200
    *frames, last = response.text.removesuffix("\n\n").split("\n\n")
    assert len(frames) >= 1 and all("choices" in frame for frame in frames)
    error = json.loads(last.removeprefix("data: "))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("server_error", "worker_error")
    assert "[DONE]" not in response.text
    assert counted(cluster) == {"500": 1}


@both
async def test_three_deaths_after_it(start: Start, asked: Asked) -> None:
    cluster = await start(*(outputs(die_after=2, delay=0.01) for _ in range(3)))
    response = await ask(cluster, asked, stream=True)
    assert response.status_code == 200
    last = response.text.removesuffix("\n\n").split("\n\n")[-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("service_unavailable", "no_worker")
    assert "failed at 3 attempts" in error["message"]
    assert counted(cluster) == {"503": 1}


async def test_a_bug(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody foresaw has the shape, too, and nothing of the inside."""
    cluster = await start(outputs())

    def fail(*_: object) -> None:
        raise ValueError("secret detail")

    monkeypatch.setattr(cluster.app.state.router.admission, "check", fail)
    for asked in (TEXT, CHAT):
        error = check(await ask(cluster, asked), 500, None, "internal_error", "its log has details")
        assert "secret" not in error["message"]
    assert counted(cluster) == {"500": 2}
