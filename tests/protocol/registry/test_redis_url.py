"""A Redis by URL: password, TLS, and who is not trusted."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.exceptions import AuthenticationError, ConnectionError  # noqa: A004

from cluster.local.ports import free_ports
from protocol.registry.redis_client import connect
from tests.cluster.tls import QUOTED, TcpRedis, certificate, tls_in_front

needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make a key")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TcpRedis]:
    server = TcpRedis(tmp_path)
    server.start()
    yield server
    server.stop()


async def test_password(server: TcpRedis) -> None:
    async with connect(server.url) as client:
        assert await client.ping()
    for wrong in ("", ":guess@"):
        async with connect(server.url.replace(f":{QUOTED}@", wrong)) as client:
            with pytest.raises(AuthenticationError):
                await client.ping()


@needs_openssl
async def test_tls_is_verified(server: TcpRedis, tmp_path: Path) -> None:
    [tls_port] = free_ports("127.0.0.1", 1)
    url = f"rediss://:{QUOTED}@127.0.0.1:{tls_port}/0"
    cert, key = certificate(tmp_path)
    with tls_in_front(server.port, tls_port, cert, key):
        async with connect(f"{url}?ssl_ca_certs={cert}") as client:
            assert await client.ping()
        async with connect(url) as client:  # nobody vouches for it
            with pytest.raises(ConnectionError, match="self-signed"):
                await client.ping()


@needs_openssl
async def test_a_certificate_of_another_host_is_refused(server: TcpRedis, tmp_path: Path) -> None:
    [tls_port] = free_ports("127.0.0.1", 1)
    cert, key = certificate(tmp_path, "DNS:elsewhere")
    url = f"rediss://:{QUOTED}@127.0.0.1:{tls_port}/0?ssl_ca_certs={cert}"
    with tls_in_front(server.port, tls_port, cert, key):
        async with connect(url) as client:
            with pytest.raises(ConnectionError, match=r"not valid for '127\.0\.0\.1'"):
                await client.ping()
