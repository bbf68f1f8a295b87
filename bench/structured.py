"""Output under random JSON schemas, while decode workers are killed; and what a grammar costs.

    python -m bench.structured [--requests 500] [--seed 1]

Each request has a schema, a prompt and sampling parameters of its own. All run twice: undisturbed,
and with ``kill -9`` of a decode worker's front or engine whenever many are in flight. Every output
must be an instance of its schema (checked by jsonschema) and the same both times. The cost is the
time per token at a client, with eight streams, with a grammar and without in turns.
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

from bench.lib.json_schemas import Schema, random_schema
from bench.lib.oracle import BUSY_ROUTER, EXACT, kill
from bench.lib.report import ResultRow, finish, median
from bench.lib.standalone import Standalone

AT_ONCE = 64
MAX_TOKENS = 2500
ROLES = ("prefill", "decode", "decode")
WORDS = ("list", "the", "person", "{", "and", "größe", "JSON", '"quoted"', "sorted", "42", "\n")
ENDLESS: Schema = {"type": "array", "items": {"type": "integer"}, "minItems": 2000}


class SchemaRequest(NamedTuple):
    """A request with the schema that its output must follow."""

    path: str
    body: dict[str, Any]
    schema: Schema


class StructuredOutput(NamedTuple):
    """An answer: its whole text, its finish reason, and the number of workers that had it."""

    text: str = ""
    reason: str = ""
    error: str = ""
    tokens: int = 0
    attempts: int = 1


def make_request(seed: int) -> SchemaRequest:
    """Draw the request with this seed: chat or completion, streamed or whole, greedy or sampled."""
    draw = random.Random(-seed)
    wanted = random_schema(seed)
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
        return SchemaRequest(
            "/v1/chat/completions", {**body, "max_completion_tokens": MAX_TOKENS}, wanted
        )
    return SchemaRequest(
        "/v1/completions", {**body, "prompt": text, "max_tokens": MAX_TOKENS}, wanted
    )


async def send_request(
    session: aiohttp.ClientSession, url: str, request: SchemaRequest
) -> StructuredOutput:
    """Send a request and return its answer; any failure is in its ``error``."""
    headers = {"x-baton-explain": "1"}
    async with session.post(url + request.path, json=request.body, headers=headers) as response:
        data = await response.read()
    if response.status != 200:
        return StructuredOutput(error=f"{response.status} {data[:300].decode()}")
    if not request.body["stream"]:
        return _joined([msgspec.json.decode(data)])
    *lines, last = [line[6:] for line in data.split(b"\n\n") if line.startswith(b"data: ")]
    if last != b"[DONE]":
        return StructuredOutput(error=f"the stream ended with {last[:300].decode()}")
    return _joined([msgspec.json.decode(line) for line in lines])


def _joined(parts: Sequence[dict[str, Any]]) -> StructuredOutput:
    text, reason, attempts, tokens = "", "", 1, 0
    for part in parts:
        for choice in part["choices"]:
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            text += said.get("content") or ""
            reason = choice["finish_reason"] or reason
        tokens = (part.get("usage") or {}).get("completion_tokens", tokens)
        attempts = len((part.get("baton") or {}).get("attempts", ())) or attempts
    return StructuredOutput(text, reason, "", tokens, attempts)


def describe_fault(request: SchemaRequest, got: StructuredOutput) -> str:
    """Describe what is wrong with an answer; an empty text means nothing."""
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


class RequestBatch:
    """Sends all requests of a list, some at once; ``running`` names those under way, ``ended``
    counts the others that were sent."""

    def __init__(self, url: str, requests: Sequence[SchemaRequest], at_once: int = AT_ONCE) -> None:
        self.running: set[str] = set()
        self.ended = 0
        self._url = url
        self._requests = requests
        self._room = asyncio.Semaphore(at_once)

    async def run(self) -> list[StructuredOutput]:
        timeout = aiohttp.ClientTimeout(total=300)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            return await asyncio.gather(*(self._one(session, r) for r in self._requests))

    async def _one(
        self, session: aiohttp.ClientSession, request: SchemaRequest
    ) -> StructuredOutput:
        async with self._room:
            name = request.body["response_format"]["json_schema"]["name"]
            self.running.add(name)
            try:
                return await send_request(session, self._url, request)
            finally:
                self.running.remove(name)
                self.ended += 1


async def run_with_kills(
    pool: Standalone,
    requests: Sequence[SchemaRequest],
    seed: int,
    kills: int,
    at_once: int = AT_ONCE,
) -> list[StructuredOutput]:
    """Send the requests while decode workers are killed, at most ``kills`` times.

    A kill waits for requests that have been through two, because a third one would end them. The
    first one waits for an output, because until then requests may all be on the way to a worker.
    """
    draw = random.Random(seed)
    load = RequestBatch(pool.url, requests, at_once)
    running = asyncio.create_task(load.run())
    before: list[set[str]] = [set(), set()]  # who was on the way at the last two kills
    for number in range(kills):
        while not running.done() and (
            not load.ended or len(load.running) < at_once or load.running & before[-2]
        ):
            await asyncio.sleep(0.01)
        await asyncio.sleep(draw.uniform(0.02, 0.2))
        if running.done():
            break
        before.append(set(load.running))
        await kill(pool, "decode", "engine" if number % 2 else "front", draw)
        await pool.whole()
    return await running


# ---- cost of a grammar ---------------------------------------------------------------------


async def ms_per_token(url: str, streams: int, tokens: int, *, grammar: bool) -> float:
    """Return the ms per token at clients after the first token, as the mean of all streams."""
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
    """Return the median ms per token (without, with) a grammar."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * rounds):
        found[bool(turn % 2)].append(await ms_per_token(url, 8, 200, grammar=bool(turn % 2)))
    return median(found[False]), median(found[True])


async def measure(count: int, seed: int) -> tuple[list[ResultRow], list[str]]:
    requests = [make_request(seed * 1_000_000 + i) for i in range(count)]
    with tempfile.TemporaryDirectory(prefix="baton-structured-") as folder:
        options = (*EXACT, "--drain-s", "1")
        pool = Standalone(Path(folder), ROLES, options, BUSY_ROUTER)
        try:
            await pool.start()
            began = time.monotonic()
            calm = await RequestBatch(pool.url, requests).run()
            calm_s = time.monotonic() - began
            hurt = await run_with_kills(pool, requests, seed, kills=count)
            free, bound = await costs(pool.url)
        finally:
            await pool.close()
    faults = {
        name: [f"{i}: {why}" for i, (r, a) in enumerate(zip(requests, got, strict=True))
               if (why := describe_fault(r, a))]
        for name, got in (("undisturbed", calm), ("with kills", hurt))
    }  # fmt: skip
    same = sum(a.text == b.text for a, b in zip(calm, hurt, strict=True))
    rows = [
        *(ResultRow(f"valid, {name}", count - len(f), "outputs", f"of {count}")
          for name, f in faults.items()),
        ResultRow("through a kill", sum(a.attempts > 1 for a in hurt), "outputs"),
        ResultRow("the same with kills and without", same, "outputs", f"of {count}"),
        ResultRow("tokens of an output, median", median([a.tokens for a in calm]), "tokens"),
        ResultRow("all of them, undisturbed", calm_s, "s"),
        ResultRow("a token without grammar, 8 streams", free, "ms"),
        ResultRow("a token with a grammar, 8 streams", bound, "ms", "without", free / bound),
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
