"""Output under random JSON schemas, while decode workers are killed; and what a grammar costs.

    python -m bench.structured [--requests 500] [--seed 1]

Each request has a schema, a prompt and sampling parameters of its own. All run twice: undisturbed,
and with ``kill -9`` of a decode worker's front or engine whenever many are in flight. Every output
must be an instance of its schema (checked by jsonschema) and the same both times. The cost is that
of a token at a client, eight streams, with a grammar and without, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
from jsonschema import Draft202012Validator

from bench.chaos import BUSY_ROUTER, EXACT, kill
from bench.report import Row, finish, median
from bench.schemas import Schema, schema
from bench.standalone import Standalone

AT_ONCE = 64
MAX_TOKENS = 2500
ROLES = ("prefill", "decode", "decode")
WORDS = ("list", "the", "person", "{", "and", "größe", "JSON", '"quoted"', "sorted", "42", "\n")
ENDLESS: Schema = {"type": "array", "items": {"type": "integer"}, "minItems": 2000}


class Asked(NamedTuple):
    path: str
    body: dict[str, Any]
    schema: Schema


class Answer(NamedTuple):
    """``text``: all of it; ``reason``: why it ended; ``attempts``: workers that had it."""

    text: str = ""
    reason: str = ""
    error: str = ""
    tokens: int = 0
    attempts: int = 1


def asked(seed: int) -> Asked:
    """The request of this number: chat or completion, streamed or whole, greedy or sampled."""
    draw = random.Random(-seed)
    wanted = schema(seed)
    text = " ".join(draw.choices(WORDS, k=draw.randint(1, 60)))
    body: dict[str, Any] = {
        "model": "baton-demo",
        "temperature": draw.choice([0.0, 0.5, 1.0, 1.5]),
        "seed": seed,
        "stream": draw.random() < 0.7,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": f"s{seed}", "schema": wanted, "strict": True},
        },
    }
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if draw.random() < 0.6:
        body["messages"] = [{"role": "user", "content": text}]
        return Asked("/v1/chat/completions", {**body, "max_completion_tokens": MAX_TOKENS}, wanted)
    return Asked("/v1/completions", {**body, "prompt": text, "max_tokens": MAX_TOKENS}, wanted)


async def answer(session: aiohttp.ClientSession, url: str, request: Asked) -> Answer:
    """What came. An error, in whatever form, is in ``error``."""
    headers = {"x-baton-explain": "1"}
    async with session.post(url + request.path, json=request.body, headers=headers) as response:
        data = await response.read()
    if response.status != 200:
        return Answer(error=f"{response.status} {data[:300].decode()}")
    if not request.body["stream"]:
        return _joined([msgspec.json.decode(data)])
    *lines, last = [line[6:] for line in data.split(b"\n\n") if line.startswith(b"data: ")]
    if last != b"[DONE]":
        return Answer(error=f"the stream ended with {last[:300].decode()}")
    return _joined([msgspec.json.decode(line) for line in lines])


def _joined(parts: Sequence[dict[str, Any]]) -> Answer:
    text, reason, attempts, tokens = "", "", 1, 0
    for part in parts:
        for choice in part["choices"]:
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            text += said.get("content") or ""
            reason = choice["finish_reason"] or reason
        tokens = (part.get("usage") or {}).get("completion_tokens", tokens)
        attempts = len((part.get("baton") or {}).get("attempts", ())) or attempts
    return Answer(text, reason, "", tokens, attempts)


def fault(request: Asked, got: Answer) -> str:
    """What is wrong with an answer; empty for nothing."""
    if got.error:
        return got.error
    if got.reason != "stop":
        return f"it ended with {got.reason!r}: {got.text[:200]}"
    try:
        value = msgspec.json.decode(got.text)
    except ValueError as error:
        return f"{error}: {got.text[:200]}"
    wrong = next(Draft202012Validator(request.schema).iter_errors(value), None)
    return "" if wrong is None else f"{wrong.message[:200]} in {got.text[:200]}"


class Load:
    """All requests of a list, some at once. ``running``: those that are on their way."""

    def __init__(self, url: str, requests: Sequence[Asked], at_once: int = AT_ONCE) -> None:
        self.running: set[str] = set()
        self._url = url
        self._requests = requests
        self._room = asyncio.Semaphore(at_once)

    async def run(self) -> list[Answer]:
        timeout = aiohttp.ClientTimeout(total=300)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            return await asyncio.gather(*(self._one(session, r) for r in self._requests))

    async def _one(self, session: aiohttp.ClientSession, request: Asked) -> Answer:
        async with self._room:
            name = request.body["response_format"]["json_schema"]["name"]
            self.running.add(name)
            try:
                return await answer(session, self._url, request)
            finally:
                self.running.remove(name)


async def disturbed(
    pool: Standalone, requests: Sequence[Asked], seed: int, kills: int, at_once: int = AT_ONCE
) -> list[Answer]:
    """The same, with decode workers killed while they are full, ``kills`` times at most; a request
    that lives through two is waited for, as the third death under it would rightly end it."""
    draw = random.Random(seed)
    load = Load(pool.url, requests, at_once)
    running = asyncio.create_task(load.run())
    before: list[set[str]] = [set(), set()]  # who was on the way at the last two kills
    for number in range(kills):
        while (len(load.running) < at_once or load.running & before[-2]) and not running.done():
            await asyncio.sleep(0.01)
        await asyncio.sleep(draw.uniform(0.1, 0.5))
        if running.done():
            break
        before.append(set(load.running))
        await kill(pool, "decode", "engine" if number % 2 else "front", draw)
        await pool.whole()
    return await running


# ---- what it costs ----------------------------------------------------------------------------


async def ms_per_token(url: str, streams: int, tokens: int, *, grammar: bool) -> float:
    """At clients, from the first token to the last; the mean of all streams."""
    body: dict[str, Any] = {"model": "baton-demo", "max_tokens": tokens, "stream": True}
    body |= {"structured_outputs": {"json": ENDLESS}} if grammar else {"ignore_eos": True}

    async def one(session: aiohttp.ClientSession, seed: int) -> float:
        sent = {**body, "prompt": f"# {seed}\n", "seed": seed}
        async with session.post(f"{url}/v1/completions", json=sent) as response:
            lines = response.content
            times = [time.perf_counter() async for line in lines if line.startswith(b"data: {")]
        return (times[-1] - times[0]) * 1e3 / (tokens - 1)

    async with aiohttp.ClientSession() as session:
        found = await asyncio.gather(*(one(session, seed) for seed in range(streams)))
    return sum(found) / len(found)


async def costs(url: str, rounds: int = 5) -> tuple[float, float]:
    """Medians (without, with)."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * rounds):
        found[bool(turn % 2)].append(await ms_per_token(url, 8, 200, grammar=bool(turn % 2)))
    return median(found[False]), median(found[True])


async def measure(count: int, seed: int) -> tuple[list[Row], list[str]]:
    requests = [asked(seed * 1_000_000 + i) for i in range(count)]
    with tempfile.TemporaryDirectory(prefix="baton-structured-") as folder:
        options = (*EXACT, "--drain-s", "1")
        pool = Standalone(Path(folder), ROLES, options, BUSY_ROUTER)
        try:
            await pool.start()
            began = time.monotonic()
            calm = await Load(pool.url, requests).run()
            calm_s = time.monotonic() - began
            hurt = await disturbed(pool, requests, seed, kills=count)
            free, bound = await costs(pool.url)
        finally:
            await pool.close()
    faults = {
        name: [f"{i}: {why}" for i, (r, a) in enumerate(zip(requests, got, strict=True))
               if (why := fault(r, a))]
        for name, got in (("undisturbed", calm), ("with kills", hurt))
    }  # fmt: skip
    same = sum(a.text == b.text for a, b in zip(calm, hurt, strict=True))
    rows = [
        *(Row(f"valid, {name}", count - len(f), "outputs", f"of {count}")
          for name, f in faults.items()),
        Row("through a kill", sum(a.attempts > 1 for a in hurt), "outputs"),
        Row("the same with kills and without", same, "outputs", f"of {count}"),
        Row("tokens of an output, median", median([a.tokens for a in calm]), "tokens"),
        Row("all of them, undisturbed", calm_s, "s"),
        Row("a token without grammar, 8 streams", free, "ms"),
        Row("a token with a grammar, 8 streams", bound, "ms", "without", free / bound),
    ]  # fmt: skip
    return rows, [f"{name}: {why}" for name, found in faults.items() for why in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rows, faults = asyncio.run(measure(options.requests, options.seed))
    print(*faults, sep="\n")
    finish("structured", rows)
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
