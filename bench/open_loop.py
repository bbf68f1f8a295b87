"""Requests sent when they are due, whatever has become of those before: what each client saw.

Times count from when a request was due, so that a client or server that falls behind is seen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec

from bench.mooncake import Arrival

MODEL = "baton-demo"
TIMEOUT_S = 60.0
KEEP_ALIVE_S = 2.0
"""Well below the server's: a connection that it is just closing would fail a request."""


class Objective(NamedTuple):
    """What a request must meet to count."""

    ttft_s: float
    tpot_s: float


class Answer(NamedTuple):
    """``status`` 0: no answer, or one that broke off. Seconds after the request was due."""

    at: float  # when it was due
    status: int
    ended_s: float
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    prompt: int = 0  # tokens
    cached: int = 0
    predicted_s: float = 0.0  # TTFT by the router
    observed_s: float = 0.0

    def meets(self, goal: Objective) -> bool:
        return self.status == 200 and self.ttft_s <= goal.ttft_s and self.tpot_s <= goal.tpot_s


class _Message(NamedTuple):
    """A request ready to send; encoded beforehand, to leave the processor to the cluster."""

    at: float
    output: int
    body: bytes


def _encoded(arrival: Arrival, salt: str) -> _Message:
    body = {
        "model": MODEL,
        "prompt": arrival.prompt,
        "max_tokens": arrival.output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "cache_salt": salt,
    }
    return _Message(arrival.at, arrival.output, msgspec.json.encode(body))


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        headers={"content-type": "application/json", "x-baton-explain": "1"},
    )


async def _send(http: aiohttp.ClientSession, url: str, message: _Message, due: float) -> Answer:
    """``due``: on time.perf_counter."""
    first = last = 0.0
    tail: dict[str, Any] = {}
    status = 0
    try:
        async with http.post(f"{url}/v1/completions", data=message.body) as response:
            if response.status != 200:
                await response.read()
                return Answer(message.at, response.status, time.perf_counter() - due)
            async for line in response.content:
                if b'"token_ids":' in line:
                    last = time.perf_counter() - due
                    first = first or last
                elif line.startswith(b'data: {"error"'):
                    break
                elif line.startswith(b"data: {"):
                    tail |= {k: v for k, v in msgspec.json.decode(line[6:]).items() if v}
                elif line.startswith(b"data: [DONE]"):
                    status = 200
    except (aiohttp.ClientError, TimeoutError):
        pass
    ended = time.perf_counter() - due
    if status != 200:
        return Answer(message.at, 0, ended)
    usage, attempt = tail["usage"], tail["baton"]["attempts"][0]
    return Answer(
        *(message.at, status, ended, first, (last - first) / (message.output - 1)),
        *(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]),
        *(attempt["chosen"]["predicted"]["ttft_s"], attempt["observed"]["ttft_s"] or 0.0),
    )


async def open_loop(url: str, arrivals: Sequence[Arrival], salt: str) -> list[Answer]:
    """All answers, in the order of arrival. ``salt``: nothing cached under another one is found."""
    messages = [_encoded(arrival, salt) for arrival in arrivals]
    sent = []
    async with session() as http:
        began = time.perf_counter()
        for message in messages:
            due = began + message.at
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            sent.append(asyncio.create_task(_send(http, url, message, due)))
        return await asyncio.gather(*sent)


async def closed_loop(
    url: str, arrivals: Sequence[Arrival], salt: str, streams: int, seconds: float
) -> float:
    """Requests answered per second with so many under way: what the cluster sustains."""
    waiting = [_encoded(arrival, salt) for arrival in reversed(arrivals)]
    began = time.perf_counter()
    done = 0

    async def client(http: aiohttp.ClientSession) -> None:
        nonlocal done
        while waiting and time.perf_counter() - began < seconds:
            answer = await _send(http, url, waiting.pop(), time.perf_counter())
            done += answer.status == 200

    async with session() as http:
        await asyncio.gather(*(client(http) for _ in range(streams)))
    return done / (time.perf_counter() - began)
