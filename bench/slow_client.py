"""Clients that read a byte a second, and clients that read what comes."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

PROMPT = 32


def body(seed: int, tokens: int, **more: Any) -> dict[str, Any]:
    """A streamed completion of so many tokens."""
    draw = random.Random(seed)
    return {
        "model": "baton-demo",
        "prompt": [draw.randrange(3, 4096) for _ in range(PROMPT)],
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": seed,
        "stream": True,
        **more,
    }


@dataclass
class SlowClient:
    reader: socket.socket
    read: bytearray = field(default_factory=bytearray)
    over: bool = False  # the server has closed the connection, or reset it

    def read_byte(self) -> None:
        try:
            data = self.reader.recv(1)
        except BlockingIOError:
            return
        except OSError:  # reset
            data = b""
        self.read += data
        self.over = not data

    def drain(self) -> bytes:
        """All that is there."""
        try:
            while data := self.reader.recv(1 << 20):
                self.read += data
            self.over = True
        except BlockingIOError:
            pass
        except OSError:
            self.over = True
        return bytes(self.read)


async def connect(url: str, sent: Sequence[dict[str, Any]]) -> list[SlowClient]:
    """A client for each body, with as small a receive buffer as there is; the requests are sent."""
    loop = asyncio.get_running_loop()
    at = urlsplit(url)
    clients = []
    for one in sent:
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        reader.setblocking(False)
        await loop.sock_connect(reader, (at.hostname, at.port))
        data = msgspec.json.encode(one)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {at.netloc}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        await loop.sock_sendall(reader, head.encode() + data)
        clients.append(SlowClient(reader))
    return clients


@asynccontextmanager
async def slow_clients(url: str, sent: Sequence[dict[str, Any]]) -> AsyncIterator[list[SlowClient]]:
    """They read from here on, and hang up in the end."""
    clients = await connect(url, sent)
    reading = asyncio.create_task(_trickle(clients) if clients else asyncio.sleep(0))
    try:
        yield clients
    finally:
        reading.cancel()
        await asyncio.wait([reading])
        for client in clients:
            client.reader.close()


async def _trickle(clients: Sequence[SlowClient]) -> None:
    """A byte a second for each, evenly spread over the second."""
    while True:
        for client in clients:
            await asyncio.sleep(1 / len(clients))
            client.read_byte()


async def gaps(url: str, sent: Sequence[dict[str, Any]]) -> list[float]:
    """Of streams that are read at once: ms between chunks, of all. Raises RuntimeError for one that
    does not end with [DONE]."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        found = await asyncio.gather(*(_gaps(session, url, one) for one in sent))
    return [gap for one in found for gap in one]


async def _gaps(session: aiohttp.ClientSession, url: str, sent: dict[str, Any]) -> list[float]:
    times, done = [], False
    async with session.post(f"{url}/v1/completions", json=sent) as response:
        if response.status != 200:
            raise RuntimeError(await response.text())
        async for line in response.content:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
            done |= line.startswith(b"data: [DONE]")
    if not done:
        raise RuntimeError("a stream ended without [DONE]")
    return [(after - before) * 1e3 for before, after in pairwise(times)]
