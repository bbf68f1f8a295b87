"""One run from the options to the result: probe, warm-up, load."""

from __future__ import annotations

import asyncio
import resource
import secrets
import signal
import time
from collections.abc import Coroutine, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from bench.serve.client import Clock, base_url, first_model, session
from bench.serve.dialect import Body, Dialect, dialects
from bench.serve.health import health
from bench.serve.loop import Loop
from bench.serve.options import Options
from bench.serve.plan import Item, Piece
from bench.serve.probe import Target, probe
from bench.serve.progress import Bar
from bench.serve.prompts import Pool, Prompts, id_pool, tokenizer_pool, word_pool
from bench.serve.result import Result, Said, result

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
PROBE = Item(0, 0.0, (Piece("probe", 8),), 2)
WARMUP_STREAMS = 8
SPARE_FILES = 64
SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def run(options: Options, console: Console, *, keep_records: bool = False) -> Result:
    """Raises StartupError before the load. SIGINT and SIGTERM end the load: the result says so."""
    options.check()
    total, items = _planned(options)
    _raise_file_limit(options.concurrency or options.max_in_flight)
    async with session(options) as http:
        url = base_url(options.url)
        model = await first_model(http, url) if options.model == "auto" else options.model
        dialect, target, pool = await _tried(options, http, url, model)
        console.print(f"{model} at {url}: {dialect.says()}; warm-up: {options.warmup} requests")
        await _warm_up(options, target)
        began = datetime.now(UTC).isoformat(timespec="seconds")
        clock, cpu = Clock(), time.process_time()
        loop = Loop(lambda item, record: target.send(item, record, clock), clock)
        with Bar(console, total, options.duration_s).watching(loop, clock):
            interrupted = await _until_signal(_load(options, loop, items))
        measured = health(loop.records, time.process_time() - cpu, clock(), options.max_in_flight)
    said = Said(began, interrupted, model, dialect.says(), pool.note)
    return result(options, said, loop.records, measured, keep_records)


def _planned(options: Options) -> tuple[int | None, Iterator[Item]]:
    """Items, and how many; None where the time decides."""
    if options.concurrency is not None and options.requests is None and options.duration_s:
        return None, options.plan()
    listed = list(options.plan())
    return len(listed), iter(listed)


async def _tried(
    options: Options, http: aiohttp.ClientSession, url: str, model: str
) -> tuple[Dialect, Target, Pool]:
    salt = options.salt or secrets.token_hex(8)
    pools: dict[bool, Pool] = {}

    def target(dialect: Dialect) -> Target:
        if dialect.ids not in pools:
            pools[dialect.ids] = _pool(options, dialect.ids)
        body = Body(options, model, dialect)
        return Target(http, url + PATHS[options.endpoint], body, Prompts(pools[dialect.ids], salt))

    dialect, found = await probe(dialects(options.endpoint), target, PROBE)
    return dialect, found, pools[dialect.ids]


def _pool(options: Options, ids: bool) -> Pool:
    if options.model_dir is not None:
        return tokenizer_pool(Path(options.model_dir), ids)
    return id_pool(*options.id_range()) if ids else word_pool()


async def _warm_up(options: Options, target: Target) -> None:
    clock = Clock()
    loop = Loop(lambda item, record: target.send(item, record, clock), clock)
    await loop.closed(iter(options.warmup_plan()), WARMUP_STREAMS, None)


async def _load(options: Options, loop: Loop, items: Iterator[Item]) -> None:
    if options.concurrency is not None:
        await loop.closed(items, options.concurrency, options.duration_s)
    else:
        await loop.open(items, options.max_in_flight)


async def _until_signal(load: Coroutine[Any, Any, None]) -> bool:
    """Whether a signal ended it. The second one ends the process."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(load)

    def stop() -> None:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
        task.cancel()

    for number in SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        await asyncio.wait({task})
    finally:
        stop()
    if task.cancelled():
        return True
    task.result()
    return False


def _raise_file_limit(connections: int) -> None:
    """As far as the system lets us: a connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
