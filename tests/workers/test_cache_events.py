"""What workers tell of their caches is what they have, through restarts of their engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import redis.asyncio

from cluster.local.redis_server import EmbeddedRedis
from cluster.worker.worker import Worker
from protocol.block_keys import block_keys
from protocol.kv_events import (
    CacheChangeKind,
    decode_fields,
    decode_snapshot,
    parse_id,
    snapshot_key,
    split_keys,
    stream_key,
)
from protocol.registry.redis_client import connect
from protocol.requests import Request
from tests.engine.conftest import ROOT, request
from tests.workers.harness import attached, running, settings, until
from tests.workers.test_handover import prompt


@contextlib.asynccontextmanager
async def client(server: EmbeddedRedis) -> AsyncIterator[redis.asyncio.Redis]:
    reader = connect(server.url)
    try:
        yield reader
    finally:
        await reader.aclose()


async def told(reader: redis.asyncio.Redis, worker: Worker) -> set[bytes] | None:
    """What is cached according to Redis, if it says."""
    stream = stream_key("test", worker.instance)
    entries = await reader.xrange(stream)  # first: what it trims, the snapshot has
    data = await reader.get(snapshot_key("test", worker.instance))
    if data is None:
        return None
    snapshot = decode_snapshot(worker.instance, data)
    keys = set(split_keys(snapshot.packed))
    for entry, fields in entries:
        for change in decode_fields(fields) if parse_id(entry) > snapshot.seq else []:
            if change.kind is CacheChangeKind.CLEARED:
                keys.clear()
            elif change.kind is CacheChangeKind.STORED:
                keys |= set(split_keys(change.packed))
            else:
                keys -= set(split_keys(change.packed))
    return keys


async def is_told(
    reader: redis.asyncio.Redis, worker: Worker, expected: set[bytes], within_s: float = 3.0
) -> None:
    keys: set[bytes] | None = None
    try:
        async with asyncio.timeout(within_s):
            while (keys := await told(reader, worker)) != expected:
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"{keys} is told, expected {expected}") from None


def blocks(r: Request, answer: list[int]) -> set[bytes]:
    """Keys of all full blocks; the KV of the answer's last token is never computed."""
    return set(block_keys(ROOT, [*r.prompt, *answer][:-1]))


async def test_both_roles_tell_what_they_cache(redis: EmbeddedRedis, model: Path) -> None:
    async with (
        running(settings("prefill", redis, model), settings("decode", redis, model)) as (p, d),
        attached(d, p) as router,
        client(redis) as reader,
    ):
        await is_told(reader, p, set())
        first, second = request("a", prompt(150, 1), max_tokens=43), request("b", prompt(100, 2))
        answer = (await router.ask(first)).tokens
        of_first = blocks(first, answer)
        assert len(of_first) == 6  # 193 tokens, the last of which has no KV
        await is_told(reader, p, set(block_keys(ROOT, first.prompt)))
        await is_told(reader, d, of_first)
        killed = d.record().engine_pid
        os.kill(killed, signal.SIGKILL)
        await is_told(reader, d, set())
        await until(lambda: d.record().engine_pid not in (0, killed), 30.0)
        answer = (await router.ask(second)).tokens
        await is_told(reader, d, blocks(second, answer))
    async with client(redis) as reader:
        assert await told(reader, p) is None and await told(reader, d) is None


async def test_what_is_evicted_is_told(redis: EmbeddedRedis, model: Path) -> None:
    async with (
        running(settings("decode", redis, model, kv_tokens=10 * 32)) as (d,),
        attached(d) as router,
        client(redis) as reader,
    ):
        first, second = request("a", prompt(190, 1)), request("b", prompt(220, 2))
        of_first = block_keys(ROOT, [*first.prompt, *(await router.ask(first)).tokens][:-1])
        assert len(of_first) == 6
        answer = (await router.ask(second)).tokens
        # 8 pages for the second: 4 were free, so that the last 4 blocks of the first had to go.
        await is_told(reader, d, blocks(second, answer) | set(of_first[:2]))
