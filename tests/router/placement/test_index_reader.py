"""From a worker's cache through Redis into the indexes of two routers, whatever Redis does."""

from __future__ import annotations

import asyncio
import hashlib
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import redis.asyncio as redis_client

from cluster.local.redis_server import EmbeddedRedis
from cluster.worker.event_log import BACKLOG_KEYS, CacheEventLog
from protocol.kv_events import encode_snapshot, snapshot_key, stream_key
from protocol.registry.redis_client import connect
from router.placement.index_reader import IndexReader
from router.placement.prefix_index import PrefixIndex

CLUSTER = "test"
ONE, TWO = "1" * 32, "2" * 32


def chain(count: int, salt: str = "") -> list[bytes]:
    return [hashlib.blake2b(f"{salt}{i}".encode(), digest_size=16).digest() for i in range(count)]


CHAIN = chain(40)


class Router:
    def __init__(self, client: redis_client.Redis) -> None:
        self.index = PrefixIndex()
        self.follower = IndexReader(client, CLUSTER, self.index)
        self.follower.follow([ONE, TWO])
        self.follower.start()

    def depth(self, instance: str) -> int:
        return self.index.match(CHAIN).get(instance, 0)


class Setting:
    """A Redis, two workers' logs, two routers."""

    def __init__(self, folder: Path) -> None:
        self.server = EmbeddedRedis(folder)
        self.server.start()
        self.client = connect(self.server.url)
        self.log, self.other = (self._log(instance) for instance in (ONE, TWO))
        self.routers = [Router(self.client), Router(self.client)]

    def _log(self, instance: str) -> CacheEventLog:
        log = CacheEventLog(
            self.client, CLUSTER, instance, renew_s=0.2, changed_s=1.0, snapshot_s=1.5
        )
        log.start()
        return log

    async def close(self) -> None:
        for part in (self.log, self.other, *(router.follower for router in self.routers)):
            await part.close()
        await self.client.aclose()
        self.server.stop()

    async def both_know(self, one: int, two: int, within_s: float = 5.0) -> None:
        await until(
            lambda: all((r.depth(ONE), r.depth(TWO)) == (one, two) for r in self.routers),
            within_s,
        )


async def until(holds: Callable[[], bool], within_s: float = 5.0) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, "not in time"
        await asyncio.sleep(0.02)


@pytest.fixture
async def setting(tmp_path: Path) -> AsyncIterator[Setting]:
    before = asyncio.all_tasks()
    setting = Setting(tmp_path)
    setting.log.stored(CHAIN[:10])
    setting.other.stored(CHAIN[:20])
    await setting.both_know(10, 20)
    yield setting
    await setting.close()
    left = {task.get_name() for task in asyncio.all_tasks() - before}
    assert not left & {"cache events", "cache index"}, "every task has ended"


async def test_changes_reach_every_router(setting: Setting) -> None:
    setting.log.stored(CHAIN[10:30])
    setting.log.evicted(CHAIN[25:30][::-1])
    await setting.both_know(25, 20)
    setting.other.cleared()
    setting.other.stored(CHAIN[:3])
    await setting.both_know(25, 3)
    assert all(r.follower.staleness_s < 1.0 for r in setting.routers)
    setting.routers.append(Router(setting.client))  # comes late, and after the stream was trimmed
    await setting.client.delete(stream_key(CLUSTER, TWO))
    await setting.both_know(25, 3)


async def test_a_worker_that_left_is_gone_at_once(setting: Setting) -> None:
    for router in setting.routers:
        router.follower.follow([TWO])
        assert router.index.match(CHAIN) == {TWO: 20}
    setting.log.stored(CHAIN)
    await asyncio.sleep(0.3)
    await setting.both_know(0, 20)
    assert all(router.index.entries == 20 for router in setting.routers)


async def test_a_worker_that_leaves_while_its_snapshot_is_read_stays_away(setting: Setting) -> None:
    bulk = chain(40_000, "bulk")
    setting.log.stored(bulk)
    await until(lambda: all(r.index.match(bulk).get(ONE) == len(bulk) for r in setting.routers))
    late = Router(setting.client)
    setting.routers.append(late)
    while not 0 < late.index.entries < len(bulk):
        await asyncio.sleep(0)
    late.follower.follow([TWO])
    assert late.index.match(bulk) == {}
    await until(lambda: late.depth(TWO) == 20 and late.index.entries == 20)


async def test_a_flushed_redis(setting: Setting) -> None:
    await setting.client.flushall()
    setting.routers.append(Router(setting.client))
    await setting.both_know(10, 20)
    setting.log.stored(CHAIN[10:15])
    await setting.both_know(15, 20)


async def test_a_change_lost_in_a_flush_that_nobody_read(setting: Setting) -> None:
    """The worker has nothing more to tell; its next look repairs what is missing."""
    for router in setting.routers:
        await router.follower.close()
    setting.log.evicted(CHAIN[5:10][::-1])
    await asyncio.sleep(0.1)
    await setting.client.flushall()
    for router in setting.routers:
        router.follower.start()
    await setting.both_know(5, 20)


async def test_redis_dies_and_comes_back_empty(setting: Setting) -> None:
    setting.server.stop()
    took = []
    for number in range(10, 40):
        began = time.perf_counter()
        setting.log.stored([CHAIN[number]])
        took.append(time.perf_counter() - began)
        await asyncio.sleep(0.02)
    assert statistics.median(took) < 0.05 and max(took) < 0.5, "it waits for no Redis"
    assert [router.depth(ONE) for router in setting.routers] == [10, 10], "kept as a hint"
    assert min(r.follower.staleness_s for r in setting.routers) > 0.3
    setting.server.start()
    await setting.both_know(40, 20, within_s=8.0)
    await until(lambda: all(r.follower.staleness_s < 1.0 for r in setting.routers))


async def _wrong_types(client: redis_client.Redis, stream: str, snapshot: str) -> None:
    await client.delete(stream, snapshot)
    await client.set(stream, "x")
    await client.sadd(snapshot, "x")


async def _junk(client: redis_client.Redis, stream: str, snapshot: str) -> None:
    await client.xadd(stream, {"e": b"\xff" * 99, "f": "x"})
    await client.set(snapshot, b"\xff" * 1000)


async def _replaced(client: redis_client.Redis, stream: str, snapshot: str) -> None:
    await client.delete(stream)
    await client.xadd(stream, {"e": b"\x01"}, id="1-0")
    await client.set(snapshot, encode_snapshot(TWO, 1, CHAIN))


@pytest.mark.parametrize("spoil", [_wrong_types, _junk, _replaced])
async def test_garbage_costs_one_worker_for_a_moment(
    setting: Setting,
    spoil: Callable[[redis_client.Redis, str, str], Awaitable[None]],
) -> None:
    await spoil(setting.client, stream_key(CLUSTER, ONE), snapshot_key(CLUSTER, ONE))
    setting.routers.append(Router(setting.client))
    setting.other.stored(CHAIN[20:22])
    await until(lambda: all(router.depth(TWO) == 22 for router in setting.routers), 1.0)
    await setting.both_know(10, 22)
    setting.log.stored(CHAIN[10:12])
    await setting.both_know(12, 22)


async def test_a_redis_that_stands_still(setting: Setting) -> None:
    admin = connect(setting.server.url)
    await admin.execute_command("CLIENT", "PAUSE", 5000)
    await admin.aclose()
    paused = time.monotonic()
    for number in range(3):  # more than the log keeps
        setting.log.stored(chain(BACKLOG_KEYS // 2, f"bulk{number}"))
        await asyncio.sleep(0)
    setting.log.stored(CHAIN[10:])
    worst = 0.0
    while time.monotonic() < paused + 4.5:
        assert setting.log._changes.pending_keys <= BACKLOG_KEYS
        began = time.perf_counter()
        setting.log.evicted([b"x" * 16])
        assert [router.depth(TWO) for router in setting.routers] == [20, 20]
        await asyncio.sleep(0.01)
        worst = max(worst, time.perf_counter() - began)
    assert worst < 0.5, "nothing held the event loop"
    await setting.both_know(40, 20, within_s=8.0)


async def test_both_keys_are_gone_with_their_worker(setting: Setting) -> None:
    assert 0 < await setting.client.pttl(stream_key(CLUSTER, ONE)) <= 30_000
    assert 0 < await setting.client.pttl(snapshot_key(CLUSTER, ONE)) <= 30_000
    await setting.log.close()
    await setting.log.close()
    assert not await setting.client.keys(f"*{ONE}")
