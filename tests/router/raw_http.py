"""HTTP as bytes on a socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import uvicorn

from router.http.limits import limited_protocol
from tests.router.conftest import Cluster, until

HOST = b"host: localhost\r\n"
TYPED = b"content-type: application/json"
JSON = TYPED + b"\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        found = json.loads(self.body)
        assert set(found) == {"error"}
        assert set(found["error"]) == {"message", "type", "param", "code"}
        assert self.headers["content-type"] == "application/json"
        error: dict[str, Any] = found["error"]
        return error


class Wire(NamedTuple):
    """A connection to the router."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def reply(self, *, head_only: bool = False) -> Reply:
        async with asyncio.timeout(10):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.rstrip().split("\r\n")
            status = int(first.split(" ")[1])
            headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
            length = 0 if head_only or status == 100 else int(headers.get("content-length", 0))
            return Reply(status, headers, await self.reader.readexactly(length))

    async def closed(self) -> bool:
        async with asyncio.timeout(10):
            return await self.reader.read(1) == b""


def post(body: bytes, *lines: bytes) -> bytes:
    head = b"".join([POST, b"content-length: %d\r\n" % len(body), *(x + b"\r\n" for x in lines)])
    return head + b"\r\n" + body


def get(path: bytes, *lines: bytes, method: bytes = b"GET") -> bytes:
    return b"%s %s HTTP/1.1\r\n" % (method, path) + HOST + b"".join(lines) + b"\r\n"


@asynccontextmanager
async def guarded_server(cluster: Cluster, head_timeout_s: float = 10.0) -> AsyncIterator[int]:
    """The router behind uvicorn, with its guard; gives its port."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        cluster.app,
        lifespan="off",
        ws="none",
        log_level="error",
        http=limited_protocol(head_timeout_s),
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    await until(lambda: server.started)
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        sock.close()


@asynccontextmanager
async def wired(
    cluster: Cluster, head_timeout_s: float = 10.0
) -> AsyncIterator[Callable[..., Awaitable[Wire]]]:
    """Opens connections to the router."""
    opened: list[Wire] = []
    async with guarded_server(cluster, head_timeout_s) as port:

        async def connect(data: bytes = b"") -> Wire:
            wire = Wire(*await asyncio.open_connection("127.0.0.1", port))
            opened.append(wire)
            wire.send(data)
            return wire

        try:
            yield connect
        finally:
            for wire in opened:
                wire.writer.close()
