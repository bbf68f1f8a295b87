"""`baton status` against real HTTP servers, in a process of its own and in this one."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.cli.status_view import render_overview
from protocol.endpoints.metrics_server import MetricsServer
from router.generation.metrics import ChoiceMetrics, RouterMetrics
from router.overview.cluster_scraper import ClusterScraper
from router.overview.overview import ClusterOverview, cluster_overview
from router.overview.scraper import ScrapeError, ScrapeLimits
from router.placement.snapshot import Objectives

Handler = Callable[[web.BaseRequest], Awaitable[web.Response]]


@asynccontextmanager
async def router(handler: Handler) -> AsyncIterator[str]:
    server = web.Server(handler)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        await server.shutdown(1.0)


def answers(groups: Any) -> Handler:
    async def sd(request: web.BaseRequest) -> web.Response:
        assert request.path == "/sd"
        return web.json_response(groups)

    return sd


def group(endpoint: str, role: str, **about: str) -> dict[str, Any]:
    about = {"role": role, "instance": f"{role}-1234", "cluster": "c", "model": "m", **about}
    return {
        "targets": [endpoint],
        "labels": {f"__meta_baton_{k}": v for k, v in about.items()} | {"__scheme__": "http"},
    }


@asynccontextmanager
async def cluster() -> AsyncIterator[str]:
    """A router and a worker with real metrics, and a worker that does not answer."""
    metrics = RouterMetrics("m", Objectives(2.0, 0.1), "r")
    meter = ChoiceMetrics(metrics, time.perf_counter(), 10)
    meter.record_tokens(1, 4)
    ChoiceMetrics(metrics, time.perf_counter(), 10).record_tokens(1, 4)  # of a request that goes on
    meter.record_end("ok", [])
    metrics.count_refusal("queue")
    registry = CollectorRegistry()
    labels = ["model", "role", "replica"]
    for name, value in (("engine_up", 1), ("requests_running", 3), ("kv_cache_usage_ratio", 0.5)):
        gauge = Gauge(f"baton_{name}", "", labels, registry=registry)
        gauge.labels("m", "decode", "x").set(value)
    tokens = Counter("baton_generation_tokens", "", labels[:2], registry=registry)
    tokens.labels("m", "decode").inc(7)

    servers = [MetricsServer(metrics.page), MetricsServer(lambda: generate_latest(registry))]
    at_router, at_worker = [await server.start("127.0.0.1", 0) for server in servers]
    groups = [
        group(at_router, "router"),
        group(at_worker, "decode", engine_pid="42"),
        group("127.0.0.1:1", "prefill"),
    ]
    async with router(answers(groups)) as url:
        yield url
    for server in servers:
        await server.close()


async def seen(url: str) -> ClusterOverview:
    async with ClusterScraper(url) as watcher:
        first = await watcher.scrape()
        return cluster_overview(url, await watcher.scrape(), first.snapshot, 1e10)


async def test_status_shows_router_and_workers() -> None:
    async with cluster() as url, ClusterScraper(url) as watcher:
        shown = cluster_overview(url, await watcher.scrape(), None, 1e10)
    assert (shown.cluster, shown.model, shown.window_s) == ("c", "m", None)
    prefill, decode = shown.workers
    assert (prefill.state, decode.state) == ("silent", "ready")
    assert prefill.why == "cannot be reached: Connection refused"
    assert (decode.running, decode.kv_usage, decode.engine_pid) == (3, 0.5, 42)
    assert decode.tokens_per_s is None  # from one look
    assert shown.router.requests == {"ok": 1}
    assert shown.router.refusals == {"queue": 1}
    assert shown.router.ttft.count == 2
    assert shown.router.slo == {"ttft": 1.0, "all": 1.0}  # of those that have ended
    assert shown.router.hit_ratio == 0.4
    async with cluster() as url:
        rates = await seen(url)
    assert rates.workers[1].tokens_per_s == 0
    assert rates.router.requests == {}  # in the window


@pytest.mark.parametrize("width", [60, 80, 120])
async def test_status_fits_the_terminal_width(width: int) -> None:
    async with cluster() as url, ClusterScraper(url) as watcher:
        look = await watcher.scrape()
        shown = cluster_overview(url, look, None, 1e10)
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    console.print(render_overview(shown, console))
    text = file.getvalue()
    assert text.splitlines()[1].startswith("strained: ")
    assert "silent" in text
    assert "127.0.0.1:1" in text
    assert "refused   by queue 1" in text
    [line] = [line for line in text.splitlines() if line.startswith("decode")]
    assert line.split()[:3] == ["decode", "decode", "ready"]
    assert " 50%" in line
    assert line.rstrip().endswith("42") == (width >= 80)


async def test_status_without_workers_says_what_that_means() -> None:
    async with router(answers([])) as url, ClusterScraper(url) as watcher:
        look = await watcher.scrape()
        shown = cluster_overview(url, look, None, 1e10)
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as capture:
        console.print(render_overview(shown, console))
    assert "\ndown: no decode worker is ready" in capture.get()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (web.Response(status=404), "answers 404"),
        (web.Response(text="<html>"), "is not Baton's"),
        (web.json_response([{"targets": "a"}]), "is not Baton's"),
    ],
)
async def test_url_of_another_server_is_an_error(answer: web.Response, why: str) -> None:
    async def handler(_: web.BaseRequest) -> web.Response:
        return answer

    async with router(handler) as url, ClusterScraper(url) as watcher:
        with pytest.raises(ScrapeError, match=why):
            await watcher.scrape()


async def test_hanging_router_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.overview.cluster_scraper.STATUS_LIMITS", ScrapeLimits(0.2, 1 << 20))

    async def handler(_: web.BaseRequest) -> web.Response:
        await asyncio.sleep(5)
        raise AssertionError

    async with router(handler) as url, ClusterScraper(url) as watcher:
        with pytest.raises(ScrapeError, match=r"does not answer within 0\.2 s"):
            await watcher.scrape()


async def run(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cluster.cli.main", "status", *arguments]
    environment = {"BATON_HOME": str(home), "PATH": ""}
    return await asyncio.to_thread(
        subprocess.run,
        command,
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
    )


async def test_status_command_prints_text_and_json(tmp_path: Path) -> None:
    async with cluster() as url:
        plain, as_json = await asyncio.gather(
            run("--url", url, home=tmp_path), run("--url", url, "--json", home=tmp_path)
        )
    assert plain.returncode == as_json.returncode == 0, plain.stderr + as_json.stderr
    assert "baton c  m" in plain.stdout
    assert "\x1b" not in plain.stdout  # piped: no colours
    found = json.loads(as_json.stdout)
    assert found["router"]["requests"] == {"ok": 1}
    assert [w["state"] for w in found["workers"]] == ["silent", "ready"]


async def test_status_without_a_cluster_fails(tmp_path: Path) -> None:
    nothing, nobody = await asyncio.gather(
        run(home=tmp_path), run("--url", "http://127.0.0.1:1", home=tmp_path)
    )
    assert nothing.returncode == nobody.returncode == 1
    assert "no cluster 'default' runs here" in nothing.stderr
    assert "cannot be reached" in nobody.stderr


def test_certificates_are_those_of_the_configuration(tmp_path: Path) -> None:
    """As for the processes that it asks: here one that is none."""
    (tmp_path / "ca.pem").write_text("none")
    names = "{ca: ca.pem, cert: ca.pem, key: ca.pem}"
    (tmp_path / "baton.yaml").write_text(f"security: {{tls: {names}}}")
    command = ["status", "--once", "--url", "http://127.0.0.1:1"]
    found = CliRunner().invoke(app, [*command, "--config", str(tmp_path / "baton.yaml")])
    assert found.exit_code == 1
    assert str(tmp_path / "ca.pem") in found.output
