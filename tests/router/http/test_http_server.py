"""A router's HTTP server where it is a guest: several at one address, and its ends."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from bench.lib.settings import router_settings
from cluster.local.ports import free_ports
from cluster.models.locate import demo_path
from protocol.errors import StartupError
from router.http import server as http_server
from router.http.server import HostedRouter, open_listening_sockets
from router.settings import RouterSettings

HOST = "127.0.0.1"


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> RouterSettings:
    monkeypatch.setattr(http_server, "_ATTACH_S", 0.1)  # there is no decode worker here
    return router_settings(
        cluster="test",
        redis_url="redis://127.0.0.1:1/0",
        token="7" * 32,
        secret=b"s" * 16,
        model_path=str(demo_path()),
        model_id="demo",
    )


@pytest.fixture
async def port() -> AsyncIterator[int]:
    [found] = free_ports(HOST, 1)
    yield found


async def alive(port: int) -> int:
    async with httpx.AsyncClient(timeout=10) as client:
        return (await client.get(f"http://{HOST}:{port}/health")).status_code


async def test_one_comes_before_the_other_goes(settings: RouterSettings, port: int) -> None:
    old = HostedRouter(settings, HOST, port, drain_s=1.0)
    await old.start()
    new = HostedRouter(settings, HOST, port, drain_s=1.0)
    await new.start()
    assert (old.problem(), new.problem()) == (None, None)
    await old.stop()
    assert [await alive(port) for _ in range(20)] == [200] * 20
    await new.stop()
    assert new.problem() is not None
    with pytest.raises(httpx.ConnectError):
        await alive(port)


async def test_a_stop_answers_who_has_connected(settings: RouterSettings, port: int) -> None:
    """Before it took the connection, and after; with the request still to come."""
    router = HostedRouter(settings, HOST, port, drain_s=3.0)
    await router.start()
    early = await asyncio.open_connection(HOST, port)
    await asyncio.sleep(0.1)
    late = socket.create_connection((HOST, port))  # the loop has no time to accept it
    stopping = asyncio.create_task(router.stop())
    await asyncio.sleep(0.2)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(HOST, port)
    late.setblocking(False)
    for reader, writer in (early, await asyncio.open_connection(sock=late)):
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 200")
        writer.close()
    await asyncio.wait_for(stopping, 10)


async def test_a_port_of_somebody_else(settings: RouterSettings, port: int) -> None:
    async def nothing(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(nothing, HOST, port)  # which does not share
    router = HostedRouter(settings, HOST, port, drain_s=1.0)
    try:
        with pytest.raises(StartupError, match=f"listen on {HOST}:{port}: Address already in use"):
            await router.start()
    finally:
        server.close()
        await server.wait_closed()


async def test_what_keeps_it_from_starting_is_told(
    settings: RouterSettings, port: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    import msgspec

    broken = msgspec.structs.replace(settings, model_path=str(tmp_path))
    with pytest.raises(StartupError, match="tokenizer"):
        await HostedRouter(broken, HOST, port, drain_s=1.0).start()


def test_a_host_that_is_not_of_this_machine() -> None:
    with pytest.raises(StartupError, match=r"cannot listen on 192\.0\.2\.1:8000"):
        open_listening_sockets("192.0.2.1", 8000)
