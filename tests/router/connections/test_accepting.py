"""Connections to a router that serves: idle ones never shut out a client with a request."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from cluster.credentials import certificates
from protocol.security.tls import HttpTls
from router.connections import acceptor
from router.http.server import RouterServer, open_listening_sockets
from tests.router.conftest import MODEL, Cluster, Start, until
from tests.router.fake_worker import outputs, silent
from tests.router.raw_http import TYPED, Reply, Wire, get, post


class Served:
    """A router's HTTP server in this process, at ``port``."""

    def __init__(self, server: RouterServer, port: int) -> None:
        self.table = server.connections
        self.port = port

    async def connect(self, data: bytes = b"", tls: ssl.SSLContext | None = None) -> Wire:
        name = None if tls is None else "localhost"
        wire = Wire(
            *await asyncio.open_connection("127.0.0.1", self.port, ssl=tls, server_hostname=name)
        )
        wire.send(data)
        return wire

    async def health(self, tls: ssl.SSLContext | None = None) -> Reply:
        wire = await self.connect(get(b"/health"), tls)
        try:
            return await wire.reply()
        finally:
            wire.writer.close()


@asynccontextmanager
async def serving(
    cluster: Cluster, listener: socket.socket | None = None, **changes: object
) -> AsyncIterator[Served]:
    settings = msgspec.structs.replace(cluster.settings, **changes)
    server = RouterServer(cluster.app, settings, 1.0, lifespan="off", log_config=None)
    sockets = [listener] if listener else open_listening_sockets("127.0.0.1", 0)
    task = asyncio.create_task(server.serve(sockets))
    await until(lambda: server.started and bool(server._acceptors))
    try:
        yield Served(server, sockets[0].getsockname()[1])
    finally:
        server.force_exit = server.should_exit = True
        await task
        assert not server._acceptors[0]._opening


def idle_sockets(stack: ExitStack, port: int, count: int) -> list[socket.socket]:
    return [
        stack.enter_context(socket.create_connection(("127.0.0.1", port), 5)) for _ in range(count)
    ]


def is_closed(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


async def test_thousand_idle_sockets_shut_nobody_out(start: Start) -> None:
    cluster = await start(outputs(delay=0.05))
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 12, "stream": True}
    async with serving(cluster, max_connections=50) as router:
        stream = await router.connect(post(json.dumps(body).encode(), TYPED))
        await until(lambda: len(cluster.workers[0].requests) == 1)
        with ExitStack() as stack:
            idle = await asyncio.to_thread(idle_sockets, stack, router.port, 1000)
            began = time.monotonic()
            assert (await router.health()).status == 200
            assert time.monotonic() - began < 1.0
            assert router.table.open <= 50 and router.table.evicted >= 950
            assert is_closed(idle[0]) and not is_closed(idle[-1])
            async with asyncio.timeout(10):
                text = await stream.reader.readuntil(b"[DONE]")
        assert text.count(b"data: {") >= 12, "a connection with a request stays"
        stream.writer.close()
        await until(lambda: router.table.open == 0)
        page = cluster.app.state.router.metrics_page().decode()
    label = f'{{model="{MODEL}",role="router"}}'
    assert f"baton_router_connections{label} 0.0" in page
    assert f"baton_router_connections_evicted_total{label} {router.table.evicted}.0" in page


async def test_half_a_head_counts_as_idle(start: Start) -> None:
    cluster = await start()
    async with serving(cluster, max_connections=8) as router:
        slow = [await router.connect(b"GET /health HTTP/1.1\r\nx-slow: ") for _ in range(8)]
        await until(lambda: router.table.open == 8)
        assert (await router.health()).status == 200
        assert await slow[0].closed()


async def test_newcomer_is_refused_where_every_connection_has_a_request(start: Start) -> None:
    cluster = await start(silent)
    body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 9}).encode()
    async with serving(cluster, max_connections=8) as router:
        busy = [await router.connect(post(body, TYPED)) for _ in range(8)]
        await until(lambda: len(cluster.workers[0].requests) == 8)
        wire = await router.connect(get(b"/health"))
        reply = await wire.reply()
        assert (reply.status, reply.error["code"]) == (503, "too_many_connections")
        assert (reply.headers["retry-after"], reply.headers["connection"]) == ("1", "close")
        assert await wire.closed()
        busy[0].writer.close()
        await until(lambda: router.table.open == 7)
        assert (await router.health()).status == 200
        assert router.table.refused == {"all": 1}
        for wire in busy:
            wire.writer.close()


async def test_unfinished_tls_handshakes_count(start: Start, tmp_path: Path) -> None:
    certificates.create_ca(tmp_path, [])
    files = HttpTls(cert=str(tmp_path / "localhost.pem"), key=str(tmp_path / "localhost.key"))
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    cluster = await start()
    async with serving(cluster, max_connections=8, http_tls=files) as router:
        silent_wires = [await router.connect() for _ in range(8)]
        await until(lambda: router.table.open == 8)
        assert (await router.health(context)).status == 200
        assert await silent_wires[0].closed() and not silent_wires[-1].reader.at_eof()
        assert router.table.evicted == 1
        for wire in silent_wires:
            wire.writer.close()
        await until(lambda: router.table.open == 0)


async def test_tls_handshake_has_a_time_limit(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "HANDSHAKE_S", 0.1)
    certificates.create_ca(tmp_path, [])
    files = HttpTls(cert=str(tmp_path / "localhost.pem"), key=str(tmp_path / "localhost.key"))
    cluster = await start()
    async with serving(cluster, http_tls=files) as router:
        assert await (await router.connect(b"\x16\x03\x01")).closed()
        await until(lambda: router.table.open == 0)


async def test_idle_connection_ends_after_its_time(start: Start) -> None:
    cluster = await start()
    async with serving(cluster, idle_timeout_s=1) as router:
        wire = await router.connect(get(b"/health"))
        assert (await wire.reply()).status == 200
        assert await wire.closed()


class _Exhausted(socket.socket):
    """A listening socket of a process that has no descriptors left, as often as it is told."""

    failures = 0

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def exhausted() -> _Exhausted:
    listener = _Exhausted()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


async def test_idle_connection_gives_its_descriptor_to_the_next(start: Start) -> None:
    cluster, listener = await start(), exhausted()
    async with serving(cluster, listener) as router:
        idle = await router.connect()
        await until(lambda: router.table.open == 1)
        listener.failures = 1
        began = time.monotonic()
        assert (await router.health()).status == 200
        assert time.monotonic() - began < 0.9, "an event loop alone waits a second"
        assert await idle.closed() and router.table.evicted == 1


async def test_spare_descriptor_refuses_where_no_connection_is_idle(start: Start) -> None:
    cluster, listener = await start(), exhausted()
    async with serving(cluster, listener) as router:
        listener.failures = 1
        wire = await router.connect()
        assert (await wire.reply()).status == 503
        assert router.table.refused == {"descriptors": 1}
        assert (await router.health()).status == 200
