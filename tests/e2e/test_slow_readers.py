"""Clients that read a byte a second: others finish, memory is bounded, pages come free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from bench.lib.oracle import BUSY_ROUTER
from bench.lib.standalone import Standalone
from tests.e2e.slow_clients import (
    ResidentMemory,
    gaps,
    heavy_bodies,
    slow_clients,
    stream_bodies,
    wait_until_idle,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(150)]

SLOW = 40
GROWTH_MIB = 40


@pytest.fixture(scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Standalone]:
    folder = tmp_path_factory.mktemp("slow")
    workers = ("--kv-tokens", "65536", "--max-model-len", "4096")
    pool = Standalone(folder, ("prefill", "decode"), workers, BUSY_ROUTER)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


async def test_who_reads_a_byte_a_second_costs_the_others_nothing(pool: Standalone) -> None:
    await gaps(pool.url, stream_bodies(4, 1, 60))
    memory = ResidentMemory(pool.routers[0].pid)
    before = memory.now
    async with memory.watched(), slow_clients(pool.url, heavy_bodies(SLOW, 2, 60)) as clients:
        assert len(await gaps(pool.url, stream_bodies(4, 3, 60))) > 100  # all to their end
        await asyncio.sleep(1.5)
        await wait_until_idle(pool)  # though they are still there
        assert not any(b"[DONE]" in client.read for client in clients)
        async with asyncio.timeout(20):  # once they read, they get all of it
            while not all(b"[DONE]" in client.drain() for client in clients):
                await asyncio.sleep(0.05)
    assert memory.most - before < GROWTH_MIB
