"""`baton status` asks processes for the cluster's name where it has one, and the router, too, where
the address that it was given proves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from cluster.cli.status_client import client_context
from cluster.credentials import certificates
from protocol.endpoints import metrics_server
from protocol.endpoints.metrics_server import MetricsServer
from protocol.security.tls import HttpTls, TlsFiles, http_context
from router.overview.metrics_pages import NoAnswer, Seen
from router.overview.watcher import Watcher

NAME = "baton.cluster"


async def look(tls: TlsFiles, router: HttpTls, name: str | None) -> Seen:
    """At a worker and a router at 127.0.0.1, the worker with ``tls``."""
    worker = MetricsServer(lambda: generate_latest(CollectorRegistry()))
    target = await worker.start("127.0.0.1", 0, tls)
    group = {"targets": [target], "labels": {"__scheme__": "https"}}

    async def listed(_: web.BaseRequest) -> web.Response:
        return web.json_response([group])

    front = web.ServerRunner(web.Server(listed))
    await front.setup()
    await web.TCPSite(front, "127.0.0.1", 0, ssl_context=http_context(router)).start()
    url = f"https://127.0.0.1:{front.addresses[0][1]}"
    context = client_context(tls.ca, tls.cert, tls.key)
    try:
        async with Watcher(url, tls=context, name=name) as watcher:
            await watcher.look()
            return await watcher.look()
    finally:
        await front.cleanup()
        await worker.close()


async def test_who_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "is_loopback", lambda _: False)  # as if it were not
    certificates.init(tmp_path, [NAME])
    certificates.node(tmp_path, ["127.0.0.1"])
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
        with pytest.raises(NoAnswer, match="TLS: "):
            await look(tls, by_name, name)
