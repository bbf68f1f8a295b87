"""Capacity and network, provoked: real workers run into either, and their records say which."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.local.redis_server import EmbeddedRedis
from cluster.worker.worker import Worker
from kvtransfer.carrier import OutboundFrame
from kvtransfer.carriers import grpc_carrier
from protocol.requests import Request
from protocol.sampling_params import SamplingParams
from router.walls.binding import STARVED, PoolWall, pool_walls
from tests.workers.harness import Client, attached, running, settings
from tests.workers.test_metrics import scrape, value

pytestmark = pytest.mark.alone

SLOW = 1_000_000  # bytes per second


def request(name: str, prompt: int, tokens: int) -> Request:
    """One that meets nothing in a cache."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    context = tuple(1 + i % 250 for i in range(prompt))
    return Request(id=name, prompt=context, sampling=sampling, cache_root=os.urandom(16))


async def loaded(
    client: Client, worker: Worker, streams: int, make: Callable[[str], Request], wall: str
) -> PoolWall:
    """The decode pool's wall, once it is ``wall``, with so many streams at a time."""
    names = (str(i) for i in itertools.count())

    async def stream() -> None:
        while True:
            await client.ask(make(next(names)))

    running = [asyncio.create_task(stream()) for _ in range(streams)]
    try:
        async with asyncio.timeout(20):
            while True:
                await asyncio.sleep(0.3)
                [_, pool] = pool_walls([worker.record()])
                if pool.binding.wall == wall:
                    return pool
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)


async def test_few_pages_for_many(redis: EmbeddedRedis, model: Path) -> None:
    small = settings("decode", redis, model, kv_tokens=256, kv_precision="fp8", kv_storage="wide")
    async with running(small) as [d], attached(d) as client:
        pool = await loaded(client, d, 8, lambda name: request(name, 60, 60), "capacity")
        found = await scrape(d)
    assert pool.figures is not None
    assert pool.figures.capacity >= STARVED
    assert [t.name for t in pool.techniques] == ["fp8 KV", "a worker on another machine"]
    replica = {"replica": d.instance[:12]}
    assert value(found, "baton_kv_starved_seconds_total") > 0
    assert value(found, "baton_wall_utilization_ratio", wall="capacity", **replica) > STARVED / 2
    assert value(found, "baton_ceiling", wall="capacity", unit="tokens") == 256
    assert value(found, "baton_ceiling", wall="compute") > 1e9
    assert value(found, "baton_engine_flops_total") > 1e6
    assert value(found, "baton_engine_bytes_total", kind="weights") > 1e6
    assert 0 < value(found, "baton_engine_busy_ratio", **replica) <= 1


@pytest.mark.parametrize("declared", [0.0, SLOW])
async def test_a_slow_link(
    redis: EmbeddedRedis, model: Path, monkeypatch: pytest.MonkeyPatch, declared: float
) -> None:
    """KV leaves a prefill worker at SLOW, whoever it is for."""
    one_at_a_time = threading.Lock()

    frame_message = grpc_carrier.frame_message

    def slowly(frame: OutboundFrame) -> bytes:
        with one_at_a_time:
            time.sleep(len(frame.payload) / SLOW)
        return frame_message(frame)

    monkeypatch.setattr(grpc_carrier, "frame_message", slowly)
    link = {"kv_carriers": ("grpc",), "link_bytes_s": declared}
    at_p = settings("prefill", redis, model, kv_precision="fp8")
    wanted = at_p, settings("decode", redis, model, kv_precision="fp8", kv_codec="raw", **link)
    async with running(*wanted) as [p, d], attached(d, p) as client:
        pool = await loaded(client, d, 3, lambda name: request(name, 400, 4), "network")
        found = await scrape(d)
    assert pool.figures is not None
    assert pool.figures.kv_wait > 0.3
    assert pool.techniques[0].name == "fp8 wire"
    assert 0.2 * SLOW < value(found, "baton_ceiling", wall="network") < 2 * SLOW
    assert value(found, "baton_kv_transfers_awaited") > 0.3
