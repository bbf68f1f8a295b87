from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import aiohttp
import pytest
import uvloop

from cluster.cli.status_client import metrics_tls_context
from cluster.credentials import certificates
from protocol.endpoints import metrics_server
from protocol.endpoints.metrics_server import MetricsServer
from protocol.errors import StartupError
from protocol.security.tls import TlsFiles


def files(folder: Path) -> TlsFiles:
    names = ("ca.pem", "localhost.pem", "localhost.key")
    ca, cert, key = (str(folder / name) for name in names)
    return TlsFiles(ca=ca, cert=cert, key=key)


async def test_beyond_loopback_it_wants_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates.create_ca(tmp_path / "ours", [])
    certificates.create_ca(tmp_path / "other", [])
    ours, other = files(tmp_path / "ours"), files(tmp_path / "other")
    with pytest.raises(StartupError, match="beyond loopback"):
        await MetricsServer(lambda: b"").start("192.0.2.1", 0)
    monkeypatch.setattr(metrics_server, "is_loopback", lambda host: False)  # as if it were not
    server = MetricsServer(lambda: b"page")
    endpoint = await server.start("127.0.0.1", 0, ours)
    async with aiohttp.ClientSession() as client:

        async def get(tls: ssl.SSLContext | None) -> bytes:
            url = f"https://{endpoint}/metrics"
            async with client.get(url, ssl=tls or True) as reply:
                return await reply.read()

        assert await get(metrics_tls_context(ours.ca, ours.cert, ours.key)) == b"page"
        anonymous = ssl.create_default_context(cafile=ours.ca)
        for stranger in (None, anonymous, metrics_tls_context(other.ca, other.cert, other.key)):
            with pytest.raises((aiohttp.ClientError, OSError)):
                await get(stranger)
    await server.close()


@pytest.mark.parametrize("policy", [asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy])
def test_a_new_ca_counts_from_the_next_scrape_on(
    policy: type[asyncio.AbstractEventLoopPolicy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "is_loopback", lambda host: False)
    monkeypatch.setattr("protocol.security.tls.CHECK_FILES_S", 0.0)
    with asyncio.Runner(loop_factory=policy().new_event_loop) as runner:
        runner.run(renewed_under_a_scraper(tmp_path))


async def renewed_under_a_scraper(folder: Path) -> None:
    certificates.create_ca(folder / "used", [])
    certificates.create_ca(folder / "next", [])
    used, after = files(folder / "used"), files(folder / "next")
    old, new = (metrics_tls_context(f.ca, f.cert, f.key) for f in (used, after))
    # It believes both, so that it is the server alone who refuses its certificate.
    old_and_trusting = metrics_tls_context(used.ca, used.cert, used.key)
    assert old_and_trusting is not None
    old_and_trusting.load_verify_locations(after.ca)
    server = MetricsServer(lambda: b"page")
    endpoint = await server.start("127.0.0.1", 0, used)
    host, _, port = endpoint.rpartition(":")

    def scrape(tls: ssl.SSLContext, session: ssl.SSLSession | None = None) -> ssl.SSLSession | None:
        with (
            socket.create_connection((host, int(port)), 5) as plain,
            tls.wrap_socket(plain, server_hostname=host, session=session) as wire,
        ):
            wire.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            if wire.recv(12) != b"HTTP/1.1 200":  # in TLS 1.3 a client is refused afterwards
                raise ConnectionResetError
            assert wire.session_reused == (session is not None)
            return wire.session

    assert old and new
    await asyncio.to_thread(scrape, old)
    session = await asyncio.to_thread(scrape, old_and_trusting)
    await asyncio.to_thread(scrape, old_and_trusting, session)
    with pytest.raises(OSError):
        await asyncio.to_thread(scrape, new)
    for name in ("ca.pem", "localhost.pem", "localhost.key"):
        (folder / "next" / name).replace(folder / "used" / name)
    await asyncio.to_thread(scrape, new)
    for stranger, resumed in ((old, None), (old_and_trusting, None), (old_and_trusting, session)):
        with pytest.raises(OSError):
            await asyncio.to_thread(scrape, stranger, resumed)
    (folder / "used" / "localhost.key").unlink()
    await asyncio.to_thread(scrape, new)
    await server.close()


async def test_who_says_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "CONNECTION_S", 0.2)
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
    assert metrics_tls_context(None, None, None) is None
    with pytest.raises(StartupError, match="go together"):
        metrics_tls_context("a", None, None)


async def test_page_of_another_host_is_not_served() -> None:
    """A web page whose name points to loopback by now must not read what programs here may."""
    server = MetricsServer(lambda: b"page")
    endpoint = await server.start("127.0.0.1", 0)
    async with aiohttp.ClientSession() as client:
        for host, status in ((endpoint, 200), ("localhost:1", 200), ("evil.example", 421)):
            async with client.get(f"http://{endpoint}/metrics", headers={"Host": host}) as reply:
                assert reply.status == status, host
    await server.close()
