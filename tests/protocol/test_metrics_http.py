from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import aiohttp
import pytest

from cluster import certs
from cluster.status import client_context
from protocol import metrics_http
from protocol.errors import StartupError
from protocol.metrics_http import MetricsServer
from protocol.tls import TlsFiles


def files(folder: Path) -> TlsFiles:
    names = ("ca.pem", "localhost.pem", "localhost.key")
    ca, cert, key = (str(folder / name) for name in names)
    return TlsFiles(ca=ca, cert=cert, key=key)


async def test_beyond_loopback_it_wants_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certs.init(tmp_path / "ours", [])
    certs.init(tmp_path / "other", [])
    ours, other = files(tmp_path / "ours"), files(tmp_path / "other")
    with pytest.raises(StartupError, match="beyond loopback"):
        await MetricsServer(lambda: b"").start("192.0.2.1", 0)
    monkeypatch.setattr(metrics_http, "is_loopback", lambda host: False)  # as if it were not
    server = MetricsServer(lambda: b"page")
    endpoint = await server.start("127.0.0.1", 0, ours)
    async with aiohttp.ClientSession() as client:

        async def get(tls: ssl.SSLContext | None) -> bytes:
            url = f"https://{endpoint}/metrics"
            async with client.get(url, ssl=tls or True) as reply:
                return await reply.read()

        assert await get(client_context(ours.ca, ours.cert, ours.key)) == b"page"
        anonymous = ssl.create_default_context(cafile=ours.ca)
        for stranger in (None, anonymous, client_context(other.ca, other.cert, other.key)):
            with pytest.raises((aiohttp.ClientError, OSError)):
                await get(stranger)
    await server.close()


async def test_who_says_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_http, "LIFE_S", 0.2)
    server = MetricsServer(lambda: b"page")
    host, _, port = (await server.start("127.0.0.1", 0)).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.1\r\nx-slow: ")
    async with asyncio.timeout(3):
        with pytest.raises(ConnectionError):
            assert await reader.read() == b""
            raise ConnectionResetError
    writer.close()
    await server.close()


def test_tls_files_go_together() -> None:
    assert client_context(None, None, None) is None
    with pytest.raises(StartupError, match="go together"):
        client_context("a", None, None)
