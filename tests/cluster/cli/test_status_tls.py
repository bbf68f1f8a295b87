"""`baton status` asks processes for the cluster's name where it has one, and the router, too, where
the address that it was given proves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from cluster.cli.status_client import metrics_tls_context
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
