"""A web page that points its own name to a keyless router (DNS rebinding) gets nothing from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.router.conftest import MODEL, Start
from tests.router.fake_worker import outputs

PATHS = ("/health", "/ready", "/metrics", "/sd", "/ui", "/ui/overview", "/v1/models")
EVIL = {"host": "evil.example:8000"}


async def test_keyless_router_refuses_the_hosts_of_others(start: Start) -> None:
    cluster = await start(outputs())
    for path in PATHS:
        reply = await cluster.client.get(path, headers=EVIL)
        assert reply.status_code == 421, path
        assert reply.json()["error"]["code"] == "host_not_allowed"
        assert "'evil.example:8000'" in reply.json()["error"]["message"]
        assert reply.headers["x-request-id"]
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
    reply = await cluster.client.post("/v1/completions", json=body, headers=EVIL)
    assert reply.status_code == 421 and not cluster.workers[0].requests
    for host in ("localhost:1", "127.0.0.1", "[::1]:8000"):
        assert (await cluster.client.get("/ui/overview", headers={"host": host})).status_code == 200


async def test_configured_names_are_allowed(start: Start) -> None:
    cluster = await start(allowed_hosts=("gpu1", "baton.example"))
    for host, status in (("gpu1:8000", 200), ("Baton.Example", 200), ("evil.example", 421)):
        assert (await cluster.client.get("/health", headers={"host": host})).status_code == status


@pytest.mark.parametrize(("names", "status"), [(None, 200), (("gpu1",), 421)])
async def test_with_api_keys_only_configured_names_count(
    start: Start, tmp_path: Path, names: tuple[str, ...] | None, status: int
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("sk-0123456789abcdef0123: a\n")
    keys.chmod(0o600)
    cluster = await start(api_keys=str(keys), allowed_hosts=names)
    assert (await cluster.client.get("/health", headers=EVIL)).status_code == status


async def test_pages_of_other_origins_can_not_ask(start: Start) -> None:
    """A browser sends JSON across origins only after OPTIONS, and reads only with permission."""
    cluster = await start(outputs())
    other = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    reply = await cluster.client.options("/v1/completions", headers=other)
    assert reply.status_code == 405
    body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 1})
    reply = await cluster.client.post(
        "/v1/completions", content=body, headers={**other, "content-type": "text/plain"}
    )
    assert reply.status_code == 415 and not cluster.workers[0].requests
    reply = await cluster.client.get("/ui/overview", headers=other)
    assert not [name for name in reply.headers if name.startswith("access-control")]
