"""Clients that read a byte per second, clients that read at once, and a process's memory.

Tests use them to show that slow readers cost the other clients and the router little.
"""

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
import psutil

from bench.lib.standalone import Standalone

HEAVY = {"logprobs": 20}
"""Adds bytes to each token of a slow client's answer, so that fewer tokens fill all buffers."""

PROMPT = 32


def body(seed: int, tokens: int, **more: Any) -> dict[str, Any]:
    """Return the body of a streamed completion of ``tokens`` tokens."""
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
    """One connection whose answer is read on demand; ``slow_clients`` creates and closes it."""

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
        """Read everything that has arrived."""
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
    """Send each body on a connection with the smallest possible receive buffer."""
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
    """Send each body and read a byte per second from each answer; close all at the end."""
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
    """Read a byte per second from each client, evenly spread over the second."""
    while True:
        for client in clients:
            await asyncio.sleep(1 / len(clients))
            client.read_byte()


async def gaps(url: str, sent: Sequence[dict[str, Any]]) -> list[float]:
    """Return the ms between the chunks of streams that are read at once.

    Raises RuntimeError for a stream that does not end with [DONE].
    """
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


class ResidentMemory:
    """The resident set of one process in MiB: its present size and its largest so far."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.most = self.now

    @property
    def now(self) -> float:
        return float(self._process.memory_info().rss) / 2**20

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        async def sample() -> None:
            while True:
                self.most = max(self.most, self.now)
                await asyncio.sleep(0.1)

        sampling = asyncio.create_task(sample())
        try:
            yield
        finally:
            sampling.cancel()
            await asyncio.wait([sampling])


def stream_bodies(count: int, seed: int, tokens: int) -> list[dict[str, Any]]:
    return [body(1000 * seed + i, tokens) for i in range(count)]


def heavy_bodies(count: int, seed: int, tokens: int) -> list[dict[str, Any]]:
    return [{**one, **HEAVY} for one in stream_bodies(count, seed, tokens)]


async def wait_until_idle(pool: Standalone, within_s: float = 120.0) -> None:
    """Wait until no worker has a request and no page is in use."""
    async with asyncio.timeout(within_s):
        while any(
            r.running or r.waiting or r.kv_tokens_free < r.kv_tokens_total
            for r in await pool.records()
        ):
            await asyncio.sleep(0.1)
