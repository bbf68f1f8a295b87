"""One look for all who watch, at pages that may be slow, large, garbage, or of somebody else."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from cluster.credentials import certificates
from protocol.endpoints import metrics_server
from protocol.endpoints.metrics_server import MetricsServer
from protocol.security.tls import TlsFiles
from router.overview import live_overview, prometheus_text
from router.overview.live_overview import CPU_SHARE, LiveOverview
from router.overview.overview import ClusterOverview
from router.overview.scraper import ScrapeLimits

UP = b'baton_engine_up{model="m",role="decode",replica="x"} 1\n'


def group(target: str, scheme: str = "http") -> dict[str, Any]:
    about = {"role": "decode", "instance": target, "cluster": "c", "model": "m"}
    labels = {f"__meta_baton_{name}": value for name, value in about.items()}
    return {"targets": [target], "labels": {**labels, "__scheme__": scheme}}


class Process:
    """A real metrics port, and how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self._server = MetricsServer(self._page)

    def _page(self) -> bytes:
        self.asked += 1
        return UP

    async def start(self, tls: TlsFiles | None = None) -> str:
        return await self._server.start("127.0.0.1", 0, tls)

    async def close(self) -> None:
        await self._server.close()


@contextlib.asynccontextmanager
async def watched(
    *groups: dict[str, Any], tls: TlsFiles | None = None
) -> AsyncIterator[LiveOverview]:
    async def discover() -> list[dict[str, Any]]:
        return list(groups)

    made = LiveOverview(discover, tls)
    try:
        yield made
    finally:
        await made.close()


async def shown(by: LiveOverview) -> ClusterOverview:
    return msgspec.json.decode(await by.overview(), type=ClusterOverview)


async def test_many_who_watch_are_one_look() -> None:
    process = Process()
    async with watched(group(await process.start())) as view:
        await asyncio.sleep(0.05)
        assert process.asked == 0, "nobody has looked"
        first = await asyncio.gather(*(view.overview() for _ in range(50)))
        assert len(set(first)) == 1
        assert await view.overview() == first[0]
        assert (view.scrapes, process.asked) == (1, 1)
    await process.close()


async def test_looks_are_apart_and_make_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_overview, "SCRAPE_INTERVAL_S", 0.05)
    process = Process()
    async with watched(group(await process.start())) as view:
        clock = asyncio.get_running_loop().time
        began = clock()
        assert (await shown(view)).window_s is None
        # On a slow machine a look costs more CPU time, and looks are further apart.
        while clock() - began < 0.5 or view.scrapes < 4:
            seen = await shown(view)
            await asyncio.sleep(0)
        took_s = clock() - began
        assert view.scrapes <= 1 + took_s / 0.05
        assert seen.window_s is not None and took_s / 2 < seen.window_s <= took_s
        asked = process.asked
        await asyncio.sleep(0.2)
        assert process.asked == asked, "nobody looks"
    await process.close()


async def test_a_look_that_costs_much_is_followed_by_a_long_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_overview, "SCRAPE_INTERVAL_S", 0.0)

    async def discover() -> list[dict[str, Any]]:
        began = time.thread_time()
        while time.thread_time() - began < 0.05:
            pass
        return []

    view = LiveOverview(discover, None)
    clock = asyncio.get_running_loop().time
    began = clock()
    await view.overview()
    await view.overview()
    assert view.scrapes == 1
    async with asyncio.timeout(10):
        while view.scrapes == 1:
            await asyncio.sleep(0.01)
            await view.overview()
    assert clock() - began > 0.05 / CPU_SHARE
    await view.close()


async def test_who_hangs_up_ends_nobody_elses_look() -> None:
    process = Process()
    async with watched(group(await process.start())) as view:
        gone = asyncio.create_task(view.overview())
        stays = asyncio.create_task(view.overview())
        await asyncio.sleep(0)
        gone.cancel()
        assert msgspec.json.decode(await stays, type=ClusterOverview).workers[0].state == "ready"
    await process.close()


async def test_what_nobody_looks_at_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_overview, "FORGET_S", 0.05)
    process = Process()
    async with watched(group(await process.start())) as view:
        await view.overview()
        assert view.history_length == 1
        await asyncio.sleep(0.1)
        assert view.history_length == 0
        assert (await shown(view)).window_s is None
    await process.close()


async def hang(_: web.BaseRequest) -> web.Response:
    await asyncio.sleep(5)
    raise AssertionError


async def much(_: web.BaseRequest) -> web.Response:
    return web.Response(body=UP * 1000)


async def elsewhere(_: web.BaseRequest) -> web.Response:
    return web.Response(status=302, headers={"location": "http://127.0.0.1:1/secret"})


async def garbage(_: web.BaseRequest) -> web.Response:
    return web.Response(text="<html>")


async def told(_: web.BaseRequest) -> web.Response:
    return web.Response(text="Call-0900-Baton{ for help\n")


async def status(_: web.BaseRequest) -> web.Response:
    return web.Response(status=500, reason="Call 0900 Baton")


async def lines(_: web.BaseRequest) -> web.Response:
    return web.Response(body=b"a 1\n" * 2000)


async def line(_: web.BaseRequest) -> web.Response:
    return web.Response(body=b'a{b="' + b"\\\\" * 2000 + b'"} 1\n')


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (hang, "does not answer within 0.5 s"),
        (much, "sends more than 8 KiB"),
        (elsewhere, "answers 302"),
        (status, "answers 500"),
        (garbage, "is not a page of metrics"),
        (told, "is not a page of metrics"),
        (lines, "is not a page of metrics"),
        (line, "is not a page of metrics"),
    ],
)
async def test_one_bad_page_costs_that_page(
    answer: Callable[[web.BaseRequest], Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_overview, "LIVE_LIMITS", ScrapeLimits(0.5, 8 << 10))
    monkeypatch.setattr(prometheus_text, "MAX_SAMPLES", 1500)
    bad = web.ServerRunner(web.Server(answer), shutdown_timeout=0)
    await bad.setup()
    await web.TCPSite(bad, "127.0.0.1", 0).start()
    good = Process()
    targets = f"127.0.0.1:{bad.addresses[0][1]}", await good.start()
    async with watched(*map(group, targets)) as view:
        seen = {worker.target: worker for worker in (await shown(view)).workers}
    assert seen[targets[0]].why == why, "and nothing of what it sent"
    assert [seen[target].state for target in targets] == ["silent", "ready"]
    await good.close()
    await bad.cleanup()


@pytest.mark.parametrize("target", ["192.0.2.1:80", "example.org:80", "[2001:db8::1]:80"])
async def test_strangers_are_not_dialled_in_the_clear(target: str) -> None:
    """Where a process is comes from Redis."""
    async with watched(group(target)) as view:
        async with asyncio.timeout(1):
            [worker] = (await shown(view)).workers
    assert "on another machine it must use https" in worker.why


@pytest.mark.parametrize("target", ["[::1]:x@", "[::1]:1^@", "localhost:1", "[::1", "a b:1", "::"])
async def test_one_bad_address_costs_that_process(target: str) -> None:
    good = Process()
    async with watched(group(target), group(await good.start())) as view:
        states = {worker.target: worker.state for worker in (await shown(view)).workers}
    assert sorted(states.values()) == ["ready", "silent"]
    assert states[target] == "silent"
    await good.close()


async def test_certificates_of_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "is_loopback", lambda _: False)  # as if it were not
    monkeypatch.setattr("protocol.security.tls.CHECK_FILES_S", 0.0)
    name = "baton.cluster"
    tls = issued(tmp_path / "mine", name)
    process = Process()
    target = group(await process.start(tls), "https")
    async with watched(target, tls=tls) as view:
        assert (await shown(view)).workers[0].state == "ready"
    stranger = issued(tmp_path / "other", name)
    async with watched(target, tls=stranger) as view:
        assert "TLS: " in (await shown(view)).workers[0].why
    async with watched(target) as view:
        assert "TLS: " in (await shown(view)).workers[0].why
    assert process.asked == 1
    await process.close()


async def test_renewed_certificates_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "is_loopback", lambda _: False)
    monkeypatch.setattr("protocol.security.tls.CHECK_FILES_S", 0.0)
    monkeypatch.setattr(live_overview, "SCRAPE_INTERVAL_S", 0.0)
    tls = issued(tmp_path / "mine", "baton.cluster")
    process = Process()
    async with watched(group(await process.start(tls), "https"), tls=tls) as view:
        await view.overview()
        issued(tmp_path / "new", "baton.cluster")
        for file in (tmp_path / "new").iterdir():
            file.replace(tmp_path / "mine" / file.name)
        assert (await shown(view)).workers[0].state == "ready"
    await process.close()


def issued(folder: Path, name: str) -> TlsFiles:
    certificates.create_ca(folder, [name])
    ca, cert, key = (str(folder / file) for file in ("ca.pem", f"{name}.pem", f"{name}.key"))
    return TlsFiles(ca=ca, cert=cert, key=key, name=name)
