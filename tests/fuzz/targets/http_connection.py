"""Raw bytes into the HTTP protocol (router/http/limits.py): cut, pipelined, ended anywhere.

The protocol class is the router's; the transport keeps what is written, and a small application
answers. Whatever comes, every request ends, the connection is closed, and nothing is logged as a
fault of the server.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from router.http.limits import limited_protocol
from tests.fuzz.byte_reader import ByteReader
from tests.fuzz.target import Budget, FuzzTarget
from tests.fuzz.virtual_loop import VirtualLoop

_LONGEST_S = 1000.0
"""Longer than every time limit of a connection together."""

_SHORTHANDS = (
    *(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"POST /body HTTP/1.1\r\nhost: x\r\n"),
    *(b"content-length: 5\r\n\r\nhello", b"transfer-encoding: chunked\r\n\r\n", b"3\r\nabc\r\n"),
    *(b"0\r\n\r\n", b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n", b"expect: 100-continue\r\n"),
    *(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n", b"connection: close\r\n", b"upgrade: h2c\r\n"),
    *(b"HEAD / HTTP/1.0\r\n\r\n", b"OPTIONS * HTTP/1.1\r\n\r\n", b"\r\n", b"x: y\r\n"),
)


class _Application:
    """A small ASGI application that counts the requests that run."""

    def __init__(self) -> None:
        self.running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        self.running += 1
        try:
            await self._answer(scope["path"], receive, send)
        finally:
            self.running -= 1

    async def _answer(self, path: str, receive: Receive, send: Send) -> None:
        size = 0
        if path == "/wait":
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        if path == "/body":
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                size, more = size + len(message["body"]), message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if path == "/stream":
            for _ in range(4):
                await send({"type": "http.response.body", "body": b"x" * 9, "more_body": True})
                await asyncio.sleep(0.1)
        await send({"type": "http.response.body", "body": str(size).encode()})


_CONFIG = uvicorn.Config(
    _Application(),
    http=limited_protocol(30.0),
    ws="none",
    lifespan="off",
    log_config=None,
    access_log=False,
    proxy_headers=False,
    timeout_keep_alive=75,
)
_CONFIG.load()


class _Transport(asyncio.Transport):
    """Keeps the number of bytes written; loses the connection once it is closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._closing = False
        self.protocol: Any = None
        self.written = 0
        self.lost = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 9), "sockname": ("127.0.0.1", 80)}.get(name, default)

    def write(self, data: Any) -> None:
        assert not self.lost, "written after the connection was lost"
        self.written += len(data)

    def write_eof(self) -> None:
        pass

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._lose)

    abort = close

    def _lose(self) -> None:
        self.lost = True
        self.protocol.connection_lost(None)


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


def fuzz_one(data: bytes) -> None:
    errors = _Errors()
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(errors)
    propagate, logger.propagate = logger.propagate, False
    loop = VirtualLoop()
    try:
        loop.run_until_complete(_connection(ByteReader(data)))
        left = asyncio.all_tasks(loop)
        assert not left, f"tasks are left: {left}"
    finally:
        loop.close()
        logger.removeHandler(errors)
        logger.propagate = propagate
    assert not errors.messages, errors.messages[0]
    assert not loop.errors, loop.errors[0]


async def _connection(reader: ByteReader) -> None:
    loop = asyncio.get_running_loop()
    application = _Application()
    _CONFIG.loaded_app = application
    state = ServerState()
    make: Any = _CONFIG.http_protocol_class
    protocol = make(config=_CONFIG, server_state=state, app_state={})
    transport = _Transport(loop)
    transport.protocol = protocol
    protocol.connection_made(transport)
    paused = False
    while reader.left and not transport.is_closing():
        paused = await _step(reader, transport, paused=paused)
    if paused and not transport.is_closing():
        transport.protocol.resume_writing()
    if not transport.is_closing() and not transport.protocol.eof_received():
        transport.close()
    await asyncio.sleep(_LONGEST_S)
    assert transport.lost, "the connection stays open"
    assert not state.connections, "the server still counts the connection"
    assert not application.running and not state.tasks, "a request does not end"


async def _step(reader: ByteReader, transport: _Transport, *, paused: bool) -> bool:
    """Do one thing to the connection; return whether its writing is paused."""
    protocol, action = transport.protocol, reader.number(16)
    if action < 6:
        protocol.data_received(_SHORTHANDS[reader.number(len(_SHORTHANDS))])
    elif action < 8:
        protocol.data_received(_SHORTHANDS[reader.number(len(_SHORTHANDS))] * reader.number(100))
    elif action < 11:
        piece = reader.piece(400)
        if piece:
            protocol.data_received(piece)
    elif action == 11:
        protocol.data_received(reader.piece(8) * reader.number(4000) or b"x")
    elif action == 12:
        await asyncio.sleep(reader.number(40))
    elif action == 13:
        protocol.resume_writing() if paused else protocol.pause_writing()
        return not paused
    elif action == 14 and reader.number(4) == 0:
        transport.abort()
    else:
        await asyncio.sleep(0)
    return paused


TARGET = FuzzTarget(
    "http_connection", fuzz_one, Budget(base_s=0.3, base_bytes=6 << 20, bytes_per_byte=4000)
)
