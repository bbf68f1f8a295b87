"""`baton status` asks processes for the cluster's name where it has one, and the router, too, where
the address that it was given proves nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from typer.testing import CliRunner, Result

from cluster.cli.main import app
from cluster.cli.status_client import metrics_tls_context
from cluster.config import assemble
from cluster.config.schema import Config
from cluster.credentials import certificates
from protocol.endpoints import metrics_server
from protocol.endpoints.metrics_server import MetricsServer
from protocol.security.tls import HttpTls, TlsFiles, https_server_context
from router.overview.cluster_scraper import ClusterScraper
from router.overview.scraper import ScrapeError, ScrapeResult

NAME = "baton.cluster"


async def look(tls: TlsFiles, router: HttpTls, name: str | None) -> ScrapeResult:
    """At a worker and a router at 127.0.0.1, the worker with ``tls``."""
    worker = MetricsServer(lambda: generate_latest(CollectorRegistry()))
    target = await worker.start("127.0.0.1", 0, tls)
    group = {"targets": [target], "labels": {"__scheme__": "https"}}

    async def listed(_: web.BaseRequest) -> web.Response:
        return web.json_response([group])

    front = web.ServerRunner(web.Server(listed))
    await front.setup()
    await web.TCPSite(front, "127.0.0.1", 0, ssl_context=https_server_context(router)).start()
    url = f"https://127.0.0.1:{front.addresses[0][1]}"
    context = metrics_tls_context(tls.ca, tls.cert, tls.key)
    try:
        async with ClusterScraper(url, tls=context, name=name) as watcher:
            await watcher.scrape()
            return await watcher.scrape()
    finally:
        await front.cleanup()
        await worker.close()


async def test_only_trusted_certificates_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "is_loopback", lambda _: False)  # as if it were not
    certificates.create_ca(tmp_path, [NAME])
    certificates.create_node_certificate(tmp_path, ["127.0.0.1"])
    by_name, by_address = (
        HttpTls(cert=str(tmp_path / f"{host}.pem"), key=str(tmp_path / f"{host}.key"))
        for host in (NAME, "127.0.0.1")
    )
    tls = TlsFiles(ca=str(tmp_path / "ca.pem"), cert=by_name.cert, key=by_name.key)
    for router in (by_name, by_address):
        assert not (await look(tls, router, NAME)).silent
    for name in (None, "other.cluster"):
        [reason] = (await look(tls, by_address, name)).silent.values()
        assert "TLS: " in reason
        with pytest.raises(ScrapeError, match="TLS: "):
            await look(tls, by_name, name)


@pytest.fixture(scope="module")
def https_router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A router that lists no process, with a certificate of a CA of its own: URL and folder."""
    folder = tmp_path_factory.mktemp("ca")
    certificates.create_ca(folder, ["localhost"])
    loop = asyncio.new_event_loop()

    async def listed(_: web.BaseRequest) -> web.Response:
        return web.json_response([])

    async def start() -> int:
        front = web.ServerRunner(web.Server(listed))
        await front.setup()
        files = HttpTls(cert=str(folder / "localhost.pem"), key=str(folder / "localhost.key"))
        site = web.TCPSite(front, "localhost", 0, ssl_context=https_server_context(files))
        await site.start()
        return int(front.addresses[0][1])

    port = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"https://localhost:{port}", folder
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def run_status(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, ["status", "--json", *arguments], env=environment)


def test_status_trusts_the_ca_that_it_is_given(https_router: tuple[str, Path]) -> None:
    url, folder = https_router
    ca = str(folder / "ca.pem")
    refused = run_status("--url", url)
    assert refused.exit_code == 1 and "--ca-file" in refused.output
    assert run_status("--url", url, "--ca-file", ca).exit_code == 0
    assert run_status("--url", url, SSL_CERT_FILE=ca).exit_code == 0
    missing = run_status("--url", url, "--ca-file", str(folder / "none.pem"))
    assert missing.exit_code == 2 and "none.pem" in missing.output


def test_monitoring_names_the_ca_in_the_environment(
    https_router: tuple[str, Path], tmp_path: Path
) -> None:
    url, folder = https_router
    ca = str(folder / "ca.pem")
    arguments = ["monitoring", str(tmp_path / "watch"), "--url", url]
    done = CliRunner().invoke(app, arguments, env={"SSL_CERT_FILE": ca})
    assert done.exit_code == 0, done.output
    assert f"ca_file: {ca}" in (tmp_path / "watch/prometheus.yml").read_text()


def test_the_ca_of_the_routers_certificate_is_found(tmp_path: Path) -> None:
    certificates.create_ca(tmp_path / "a", [])
    certificates.create_ca(tmp_path / "b", [])
    https = HttpTls(cert=str(tmp_path / "a/localhost.pem"), key=str(tmp_path / "a/localhost.key"))
    launch = assemble.launch_settings(Config())
    router = msgspec.structs.replace(launch.router, http_tls=https)
    assert launch.https_ca is None
    launch = msgspec.structs.replace(launch, router=router, host="0.0.0.0")
    assert launch.url == "https://localhost:8000"
    assert launch.https_ca == str(tmp_path / "a/ca.pem")
    (tmp_path / "a/ca.pem").write_bytes((tmp_path / "b/ca.pem").read_bytes())
    assert launch.https_ca is None
