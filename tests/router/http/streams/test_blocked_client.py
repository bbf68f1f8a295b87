"""A client that neither reads nor hangs up: its response ends, with an error on its way, too."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.router.conftest import MODEL, Cluster, Start, until
from tests.router.fake_worker import Script, outputs, silent


class BlockedClient:
    """An HTTP client of the application that reads nothing after the head."""

    def __init__(self) -> None:
        self.types: list[str] = []
        self._requested = False

    async def receive(self) -> dict[str, Any]:
        if self._requested:
            await asyncio.Event().wait()
        self._requested = True
        body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 9, "stream": True})
        return {"type": "http.request", "body": body.encode(), "more_body": False}

    async def send(self, message: Any) -> None:
        self.types.append(message["type"])
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def request(self, cluster: Cluster) -> None:
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        async with asyncio.timeout(5):
            await cluster.app(scope, self.receive, self.send)


@pytest.mark.parametrize("script", [outputs(), silent])
async def test_a_response_that_cannot_be_sent_ends(
    start: Start, monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    monkeypatch.setattr("router.http.streams.event_sender.STUCK_S", 0.3)
    cluster = await start(script, keep_alive_s=0.02, first_token_timeout_s=0.1)
    client = BlockedClient()
    await client.request(cluster)
    assert client.types == ["http.response.start", "http.response.body"]
    await until(lambda: not cluster.app.state.router.tenants.quotas.running())
