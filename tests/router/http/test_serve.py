"""The live page over HTTP: what it is made of, who may see what, and what it costs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from router.http.ui_routes import PAGE, SECURITY_HEADERS, static_files
from tests.router.conftest import Cluster, Start
from tests.router.fake_worker import outputs

BUDGET = 30 * 1024
"""Bytes of the whole page, as browsers get it."""


def looks(cluster: Cluster) -> int:
    return int(cluster.app.state.router.live_overview.scrapes)


async def test_the_page_and_its_parts(start: Start) -> None:
    cluster = await start()
    size = 0
    for name, file in static_files().items():
        path = "/ui" if name == PAGE else f"/ui/{name}"
        reply = await cluster.client.get(path)
        assert (reply.status_code, reply.content) == (200, file.body)
        assert SECURITY_HEADERS.items() <= reply.headers.items()
        size += int(reply.headers["content-length"])
        plain = await cluster.client.get(path, headers={"accept-encoding": "identity"})
        assert plain.content == file.body and "content-encoding" not in plain.headers
        again = await cluster.client.get(path, headers={"if-none-match": reply.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert SECURITY_HEADERS.items() <= again.headers.items()
    assert size <= BUDGET
    assert looks(cluster) == 0, "the page costs nothing, only what it asks for"


@pytest.mark.parametrize("path", ["/ui/", "/ui/page.html", "/ui/serve.py", "/ui/%2e%2e/serve.py"])
async def test_nothing_else_is_there(start: Start, path: str) -> None:
    cluster = await start()
    reply = await cluster.client.get(path)
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "not_found"


async def test_the_root_leads_to_the_page(start: Start) -> None:
    cluster = await start()
    reply = await cluster.client.get("/")
    assert (reply.status_code, reply.headers["location"]) == (307, "ui")
    assert reply.url.join(reply.headers["location"]).path == "/ui"


@pytest.mark.parametrize("path", ["/", "/ui", "/ui/page.js", "/ui/overview"])
async def test_it_is_only_looked_at(start: Start, path: str) -> None:
    cluster = await start()
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        reply = await cluster.client.request(method, path)
        assert (reply.status_code, reply.headers["allow"]) == (405, "GET, HEAD")


def test_nothing_comes_from_elsewhere_and_nothing_is_inline() -> None:
    sources = {name: file.body.decode() for name, file in static_files().items()}
    for name, source in sources.items():
        urls = set(re.findall(r"https?://[^\"')\s]+", source))
        assert urls <= {"http://www.w3.org/2000/svg"}, name  # a namespace, not an address
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", source)
    page = sources[PAGE]
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]*\bsrc=)", page)
    wanted = set(re.findall(r'(?:src|href)="ui/([^"]+)"', page))
    imported = {m for s in sources.values() for m in re.findall(r'from "\./([^"]+)"', s)}
    assert wanted | imported == sources.keys() - {PAGE}


async def test_the_overview(start: Start) -> None:
    cluster = await start(outputs())
    reply = await cluster.client.get("/ui/overview")
    assert reply.headers["cache-control"] == "no-store"
    assert SECURITY_HEADERS.items() <= reply.headers.items()
    seen: dict[str, Any] = reply.json()
    assert (seen["cluster"], seen["model"], seen["window_s"]) == ("test", "tiny", None)
    assert seen["router"]["replicas"] == 1
    goals = cluster.settings.goals
    assert seen["router"]["objectives"] == {"ttft": goals.ttft_s, "tpot": goals.tpot_s}
    assert seen["verdict"]["level"] == "fine"  # the fake worker has no metrics, and answers


async def test_the_data_wants_a_key(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-1: {tenant: acme, scopes: [monitor]}\nsk-3: acme")
    keys.chmod(0o600)
    cluster = await start(api_keys=str(keys))
    assert (await cluster.client.get("/ui")).status_code == 200
    for headers in ({}, {"authorization": "Bearer sk-2"}):
        reply = await cluster.client.get("/ui/overview", headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    reply = await cluster.client.get("/ui/overview", headers={"authorization": "Bearer sk-3"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "insufficient_scope")
    assert looks(cluster) == 0
    reply = await cluster.client.get("/ui/overview", headers={"authorization": "Bearer sk-1"})
    assert reply.status_code == 200
