"""Loans and scale-downs under load: every stream must have the text that a quiet cluster gives it.

    python -m bench.autoscale_churn [--events 50] [--seed N]

A local cluster of two prefill and three decode workers on paced engines, with exact KV and greedy
decoding. First each prompt is answered while nothing changes. Then streams run, 16 at a time, while
events follow each other: a decode worker is lent to the prefill pool and hands over the requests
that it cannot finish; it comes back; and every fifth event stops one decode worker and starts
another.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median
from typing import Any, NamedTuple

import aiohttp
import msgspec

from bench.lib.http_load import MODEL, session
from bench.lib.paced_cluster import DEVICE, PacedCluster, paced_cluster
from bench.lib.report import ResultRow, finish
from protocol.registry.directory import WorkerRecord

PREFILL, DECODE = 2, 3
STREAMS, PROMPTS, QUIET = 16, 24, 6
OUTPUT = 80
DRAINS_S = (0.0, 0.5, 2.0)
PAUSE_S = 0.5
_WHOLE_S = 90.0


class ChurnPrompt(NamedTuple):
    """A prompt that is sent again and again."""

    tokens: list[int]
    output: int


class StreamText(NamedTuple):
    """The text of one stream; ``ended`` means a finish reason, [DONE] and no error."""

    prompt: int
    text: str
    ended: bool
    why: str = ""


class ChurnEvents(NamedTuple):
    """Seconds of each loan, return and scale-down, and the requests that each loan handed over."""

    lent_s: list[float]
    back_s: list[float]
    handed_over: list[int]
    scaled_s: list[float]

    @property
    def total(self) -> int:
        return len(self.lent_s) + len(self.back_s) + len(self.scaled_s)


def prompts(seed: int) -> list[ChurnPrompt]:
    """Draw prompts, of which some are short enough for a decode worker to compute itself."""
    draw = random.Random(seed)
    return [
        ChurnPrompt(
            [draw.randrange(3, 4096) for _ in range(size)], draw.randint(OUTPUT // 2, OUTPUT)
        )
        for size in (draw.choice((24, 150, 400)) for _ in range(PROMPTS))
    ]


async def listen(
    http: aiohttp.ClientSession, url: str, number: int, prompt: ChurnPrompt
) -> StreamText:
    body = {
        "model": MODEL,
        "prompt": prompt.tokens,
        "max_tokens": prompt.output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text, finished = "", False
    try:
        async with http.post(f"{url}/v1/completions", data=msgspec.json.encode(body)) as response:
            if response.status != 200:
                return StreamText(number, "", False, f"{response.status} {await response.text()}")
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    return StreamText(
                        number, text, finished, "" if finished else "no finish reason"
                    )
                if line.startswith(b"data: {"):
                    part: dict[str, Any] = msgspec.json.decode(line[6:])
                    if "error" in part:
                        return StreamText(number, text, False, str(part["error"]))
                    for choice in part["choices"]:
                        text += choice["text"]
                        finished = finished or choice["finish_reason"] is not None
    except (aiohttp.ClientError, TimeoutError) as error:
        return StreamText(number, text, False, repr(error))
    return StreamText(number, text, False, "ended without [DONE]")


@asynccontextmanager
async def streams(url: str, load: list[ChurnPrompt]) -> AsyncIterator[list[StreamText]]:
    """Keep streams running, each prompt in turn; at the end, wait for those under way."""
    heard: list[StreamText] = []
    stopped = False
    turns = iter(range(10**9))

    async def client(http: aiohttp.ClientSession) -> None:
        while not stopped:
            number = next(turns) % len(load)
            heard.append(await listen(http, url, number, load[number]))

    async with session() as http, asyncio.TaskGroup() as tasks:
        for _ in range(STREAMS):
            tasks.create_task(client(http))
        try:
            yield heard
        finally:
            stopped = True


class Churn:
    """Runs loans, returns and scale-downs one after the other on one cluster."""

    def __init__(self, cluster: PacedCluster, seed: int) -> None:
        self._cluster = cluster
        self._draw = random.Random(seed)
        self.events = ChurnEvents([], [], [], [])

    async def run(self, count: int) -> None:
        number = 0
        while self.events.total < count:
            number += 1
            if number % 5 == 0:
                await self._scale_down()
            elif number % 5 % 2:
                await self._lend()
            else:
                await self._return()
            await asyncio.sleep(PAUSE_S)

    async def _lend(self) -> None:
        """Lend the decode worker with the most streams, so that some must be handed over."""
        decoding = [w for w in await self._cluster.workers() if w.role == "decode"]
        busiest = max(decoding, key=lambda w: w.running)
        await self._change(busiest, "prefill", self.events.lent_s)

    async def _return(self) -> None:
        for worker in [w for w in await self._cluster.workers() if w.lent]:
            await self._change(worker, worker.home, self.events.back_s)

    async def _change(self, worker: WorkerRecord, role: str, seconds: list[float]) -> None:
        """Change a worker's role, and wait until it is registered in the new one."""
        began = time.monotonic()
        reply = await self._cluster.lend(worker, role, self._draw.choice(DRAINS_S))
        while not await self._is(worker.instance, role):
            await asyncio.sleep(0.02)
        seconds.append(time.monotonic() - began)
        self.events.handed_over.append(reply.handed_over)

    async def _is(self, instance: str, role: str) -> bool:
        found = [w for w in await self._cluster.workers() if w.instance == instance]
        return bool(found) and found[0].role == role and not found[0].changing

    async def _scale_down(self) -> None:
        """Stop one decode worker, which Ray Serve chooses, and start another."""
        began = time.monotonic()
        await asyncio.to_thread(self._cluster.scale, PREFILL, DECODE - 1)
        self.events.scaled_s.append(time.monotonic() - began)
        await asyncio.sleep(PAUSE_S)
        await asyncio.to_thread(self._cluster.scale, PREFILL, DECODE)
        async with asyncio.timeout(_WHOLE_S):
            while len([w for w in await self._cluster.workers() if not w.draining]) < 5:
                await asyncio.sleep(0.2)


async def _quiet(url: str, load: list[ChurnPrompt]) -> list[StreamText]:
    """Answer each prompt while nothing changes."""
    room = asyncio.Semaphore(QUIET)

    async def one(http: aiohttp.ClientSession, number: int) -> StreamText:
        async with room:
            return await listen(http, url, number, load[number])

    async with session() as http:
        return await asyncio.gather(*(one(http, number) for number in range(len(load))))


async def _measure(cluster: PacedCluster, count: int, seed: int) -> list[ResultRow]:
    load = prompts(seed)
    quiet = await _quiet(cluster.url, load)
    assert all(each.ended for each in quiet), "a prompt was not answered on the quiet cluster"
    churn_ = Churn(cluster, seed)
    async with streams(cluster.url, load) as heard:
        await churn_.run(count)
    lost = [each for each in heard if not each.ended]
    other = [each for each in heard if each.ended and each.text != quiet[each.prompt].text]
    for each in [*lost, *other][:5]:
        print(f"prompt {each.prompt}: {each.why or 'another text'}", flush=True)
    return _rows(churn_.events, len(heard), len(lost), len(other), cluster)


def _rows(
    events: ChurnEvents, streams: int, lost: int, other: int, cluster: PacedCluster
) -> list[ResultRow]:
    found = [
        ResultRow("loans and scale-downs", events.total, ""),
        ResultRow("scale-downs of these", len(events.scaled_s), ""),
        ResultRow("requests handed over by loans", sum(events.handed_over), ""),
        ResultRow("streams", streams, ""),
        ResultRow("streams lost", lost, ""),
        ResultRow("streams with another text", other, ""),
        ResultRow("steps late", cluster.lateness().late_share, "of steps"),
    ]
    for name, seconds in (("to prefill", events.lent_s), ("back", events.back_s)):
        if seconds:
            found.append(ResultRow(f"loan {name}, median", median(seconds), "s"))
            found.append(ResultRow(f"loan {name}, slowest", max(seconds), "s"))
    return found


def churn(count: int, seed: int) -> list[ResultRow]:
    """Run at least ``count`` loans and scale-downs on a cluster of its own."""
    pools = ("--prefill", str(PREFILL), "--decode", str(DECODE), "--kv-precision", "exact")
    with paced_cluster(DEVICE, *pools) as cluster:
        return asyncio.run(_measure(cluster, count, seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=50, help="loans and scale-downs, at least")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    finish("autoscale_churn", churn(options.events, options.seed))


if __name__ == "__main__":
    main()
