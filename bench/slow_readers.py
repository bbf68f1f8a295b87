"""Clients that read a byte a second: what the others notice of them, and what they cost.

    python -m bench.slow_readers [--slow 200] [--streams 8] [--rounds 5]

One prefill and one decode worker, demo model. In each round the same streams run without slow
clients and beside them, in turns:

- *they lie*: everything for them has been computed, and waits to be read;
- *they come*: it is being computed, compared with as many clients that do read: computing for 200
  more costs the others time, whoever reads it.

Memory is the router's resident set. In the end some slow clients ask for more than the buffers
between the router and them hold: it must cut them, and no page may be left in use.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench.report import Row, finish, median, percentile
from bench.slow_client import body, gaps, slow_clients
from bench.standalone import Standalone

TOKENS = 200
LYING_TOKENS = 80
COMING_TOKENS = 40
LONG_TOKENS = 1500
LONG_CLIENTS = 24
HEAVY = {"logprobs": 20}
"""Of slow clients' requests: more bytes for each token, so that fewer tokens fill all buffers."""

POOL = ("--kv-tokens", "131072", "--max-model-len", "4096")


class Memory:
    """Of a process: its resident set now and then, in MiB."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.most = self.now

    @property
    def now(self) -> float:
        return float(self._process.memory_info().rss) / 2**20

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        async def look() -> None:
            while True:
                self.most = max(self.most, self.now)
                await asyncio.sleep(0.1)

        looking = asyncio.create_task(look())
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.wait([looking])


class Pair(NamedTuple):
    """Gaps between chunks in ms."""

    without: list[float]
    beside: list[float]


def streams(count: int, seed: int, tokens: int = TOKENS) -> list[dict[str, Any]]:
    return [body(1000 * seed + i, tokens) for i in range(count)]


def heavy(count: int, seed: int, tokens: int) -> list[dict[str, Any]]:
    return [{**one, **HEAVY} for one in streams(count, seed, tokens)]


async def idle(pool: Standalone, within_s: float = 120.0) -> None:
    """Until no worker has anything to do, and no page is in use."""
    async with asyncio.timeout(within_s):
        while any(
            r.running or r.waiting or r.kv_tokens_free < r.kv_tokens_total
            for r in await pool.records()
        ):
            await asyncio.sleep(0.1)


async def lying(pool: Standalone, slow: int, count: int, turn: int) -> Pair:
    """Streams without slow clients, and beside those that everything has been computed for; every
    other turn the other way round."""
    found: dict[bool, list[float]] = {}
    for beside in (bool(turn % 2), not turn % 2):
        seed = 10 * turn + 2 * beside
        async with slow_clients(pool.url, heavy(slow * beside, seed, LYING_TOKENS)) as clients:
            await asyncio.sleep(1.5)  # until the directory knows of them
            await idle(pool)
            found[beside] = await gaps(pool.url, streams(count, seed + 1))
            assert not any(client.over for client in clients)
        await idle(pool)
    return Pair(found[False], found[True])


async def coming(pool: Standalone, slow: int, count: int, turn: int) -> Pair:
    """Streams beside many that are read, and beside as many that are not."""
    found: dict[bool, list[float]] = {}
    for unread in (bool(turn % 2), not turn % 2):
        seed = 10 * turn + 2 * unread + 5000
        many = heavy(slow, seed, COMING_TOKENS)
        async with slow_clients(pool.url, many if unread else []):
            others = asyncio.create_task(gaps(pool.url, [] if unread else many))
            await asyncio.sleep(1.0)  # the many are first, read or not
            found[unread] = await gaps(pool.url, streams(count, seed + 1, COMING_TOKENS))
            await others
            await asyncio.sleep(1.5)
            await idle(pool)
    return Pair(found[False], found[True])


async def the_end(pool: Standalone, within_s: float) -> tuple[int, float]:
    """(Slow clients that the router has cut, seconds until it had). The others' answers fit into
    the buffers between the router and them: it has done its part."""
    began = time.monotonic()
    async with slow_clients(pool.url, heavy(LONG_CLIENTS, 99_999, LONG_TOKENS)) as clients:
        while not all(c.over for c in clients) and time.monotonic() < began + within_s:
            await asyncio.sleep(0.5)
        took_s = time.monotonic() - began
        await idle(pool)  # while they are still there
        return sum(c.over for c in clients), took_s


def compared(name: str, against: str, pairs: Sequence[Pair]) -> list[Row]:
    """The p99 of all gaps, and the median of what each round says of it."""
    rows = []
    for label, share in (("p50", 0.5), ("p99", 0.99)):
        without, beside = (percentile([g for p in pairs for g in p[i]], share) for i in (0, 1))
        rows.append(Row(f"{name}: ITL {label}", beside, "ms", f"{against} {without:.2f} ms"))
        ratios = [percentile(p.beside, share) / percentile(p.without, share) for p in pairs]
        rows.append(Row(f"{name}: {label}, median of rounds", median(ratios), "times", against))
    return rows


async def measure(slow: int, count: int, rounds: int, end_s: float) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="baton-slow-") as folder:
        pool = Standalone(Path(folder), ("prefill", "decode"), worker_options=POOL)
        try:
            await pool.start()
            await gaps(pool.url, streams(count, 77_777))
            memory = Memory(pool.routers[0].pid)
            before = memory.now
            async with memory.watched():
                lie = [await lying(pool, slow, count, turn) for turn in range(rounds)]
                come = [await coming(pool, slow, count, turn) for turn in range(rounds)]
                cut, took_s = await the_end(pool, end_s)
            after = memory.now
        finally:
            await pool.close()
    return [
        *compared(f"{slow} slow clients lie", "without", lie),
        *compared(f"{slow} slow clients come", "as many that read", come),
        Row("router's memory at first", before, "MiB"),
        Row("at most", memory.most, "MiB"),
        Row("afterwards", after, "MiB"),
        Row(f"cut, of {LONG_CLIENTS} that are sent {LONG_TOKENS} tokens", cut, "clients"),
        Row("until then", took_s, "s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slow", type=int, default=200)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--end-s", type=float, default=120.0, help="how long to wait for their end")
    o = parser.parse_args()
    finish("slow_readers", asyncio.run(measure(o.slow, o.streams, o.rounds, o.end_s)))


if __name__ == "__main__":
    main()
