"""A client that does not read: its connection is cut, and what was computed for it given up."""

from __future__ import annotations

import asyncio
import json
import socket

import uvicorn

from router.http.limits import UnreadTimeoutProtocol
from tests.router.conftest import MODEL, Start, until
from tests.router.fake_worker import outputs


class Impatient(UnreadTimeoutProtocol):
    unread_timeout_s = 0.5


async def test_who_does_not_read_is_cut_and_who_reads_is_not(start: Start) -> None:
    cluster = await start(outputs(delay=0.001))
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # connections inherit it
    listening.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        cluster.app, lifespan="off", ws="none", log_level="error", http=Impatient
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    await until(lambda: server.started)
    at = listening.getsockname()
    sent = {"model": MODEL, "prompt": "hi", "max_tokens": 3000, "stream": True}
    data = json.dumps(sent).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n"
    request = f"{head}content-type: application/json\r\n\r\n".encode() + data
    stuck = socket.socket()
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    stuck.connect(at)
    stuck.send(request)
    reading, writing = await asyncio.open_connection(*at, limit=1 << 24)
    writing.write(request)
    admission = cluster.app.state.router.admission
    try:
        await until(lambda: sum(admission.inside.values()) == 2)
        text = await asyncio.wait_for(reading.readuntil(b"[DONE]"), 20)
        assert text.count(b"data: {") > 10
        await until(lambda: not sum(admission.inside.values()))
        got = await asyncio.to_thread(drained, stuck)
        assert got.startswith(b"HTTP/1.1 200") and b"[DONE]" not in got
    finally:
        writing.close()
        stuck.close()
        server.should_exit = True
        await serving


def drained(stuck: socket.socket) -> bytes:
    """What it gets when it reads at last."""
    got = b""
    stuck.settimeout(10)
    try:
        while data := stuck.recv(65536):
            got += data
    except ConnectionResetError:
        pass
    return got
