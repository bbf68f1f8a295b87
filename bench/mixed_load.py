"""Short chats with long prompts among them, in an open loop: what each client saw, gap by gap.

Times count from when a request was due. A gap is the time between two chunks of a stream, as a
reader sees it; a chunk may bring several tokens.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import aiohttp
import msgspec

from bench.open_loop import KEEP_ALIVE_S
from bench.report import percentile

FIRST_ID, VOCAB = 3, 4096
TIMEOUT_S = 240.0


class Mix(NamedTuple):
    """Every ``every``-th request has a long prompt. Lengths in tokens."""

    short: int = 128
    long: int = 1500
    output: int = 64
    every: int = 4


class Due(NamedTuple):
    at: float  # seconds after the beginning
    long: bool
    body: bytes


class Seen(NamedTuple):
    """One answer; ``ok`` when it came whole. Seconds."""

    long: bool
    ok: bool
    ttft: float
    tpot: float
    gaps: list[float]


def arrivals(mix: Mix, rate: float, count: int, seed: int, model: str) -> list[Due]:
    """A Poisson process of ``rate`` per second; prompts of random tokens that share nothing."""
    draw = random.Random(seed)
    at, found = 0.0, []
    for i in range(count):
        long = i % mix.every == mix.every - 1
        size = mix.long if long else mix.short
        prompt = [draw.randrange(FIRST_ID, VOCAB) for _ in range(size)]
        found.append(Due(at, long, _body(model, prompt, mix.output)))
        at += draw.expovariate(rate)
    return found


def _body(model: str, prompt: Sequence[int], output: int) -> bytes:
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
    )


async def _send(http: aiohttp.ClientSession, url: str, due: Due, when: float) -> Seen:
    """``when``: it is due, on time.perf_counter."""
    times: list[float] = []
    whole = False
    try:
        async with http.post(f"{url}/v1/completions", data=due.body) as response:
            async for line in response.content:
                if b'"token_ids":' in line:
                    times.append(time.perf_counter())
                elif line.startswith(b"data: [DONE]"):
                    whole = True
    except (aiohttp.ClientError, TimeoutError):
        pass
    if not whole:
        return Seen(due.long, False, float("inf"), float("inf"), [])
    gaps = [b - a for a, b in pairwise(times)]
    output = msgspec.json.decode(due.body)["max_tokens"]
    return Seen(due.long, True, times[0] - when, (times[-1] - times[0]) / (output - 1), gaps)


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        headers={"content-type": "application/json"},
    )


async def open_loop(url: str, load: Sequence[Due]) -> tuple[list[Seen], float]:
    """All answers, in the order of arrival, and the seconds until the last one ended."""
    async with _session() as http:
        began = time.perf_counter()
        sent = []
        for due in load:
            when = began + due.at
            await asyncio.sleep(max(0.0, when - time.perf_counter()))
            sent.append(asyncio.create_task(_send(http, url, due, when)))
        seen = await asyncio.gather(*sent)
        return seen, time.perf_counter() - began


async def closed_loop(url: str, load: Sequence[Due], streams: int) -> tuple[list[Seen], float]:
    """The same with so many under way at a time; times count from when a request was sent."""
    waiting = list(reversed(load))
    seen: list[Seen] = []

    async def client(http: aiohttp.ClientSession) -> None:
        while waiting:
            seen.append(await _send(http, url, waiting.pop(), time.perf_counter()))

    began = time.perf_counter()
    async with _session() as http:
        await asyncio.gather(*(client(http) for _ in range(streams)))
    return seen, time.perf_counter() - began


class Goal(NamedTuple):
    """What a request must meet to count as good. Seconds."""

    ttft: float
    tpot: float


class Figures(NamedTuple):
    """Seconds, and requests per second. Of failed requests TTFT is infinite."""

    goodput: float
    answered: float
    ttft_p50: float
    ttft_p99: float
    short_ttft_p99: float
    itl_p50: float
    itl_p99: float
    tpot_p90: float


def figures(seen: Sequence[Seen], seconds: float, goal: Goal) -> Figures:
    gaps = [gap for s in seen for gap in s.gaps] or [float("inf")]
    ttft = [s.ttft for s in seen]
    short = [s.ttft for s in seen if not s.long]
    good = sum(s.ok and s.ttft <= goal.ttft and s.tpot <= goal.tpot for s in seen)
    return Figures(
        good / seconds,
        sum(s.ok for s in seen) / seconds,
        percentile(ttft, 0.5),
        percentile(ttft, 0.99),
        percentile(short, 0.99),
        percentile(gaps, 0.5),
        percentile(gaps, 0.99),
        percentile([s.tpot for s in seen], 0.9),
    )
