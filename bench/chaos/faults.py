"""What the soak does to a pool. Each fault ends what it began, also when it is cancelled.

deadly   may take one worker from a request: two in a round, because the third death within
         a minute rightly ends a request (protocol/retry_budget.py)
harmless Redis, and the router standing still: no request may notice more than a pause
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import redis

from bench.chaos.cut_links import LinkCutter
from bench.lib.standalone import Standalone
from protocol.registry.directory import WorkerRecord
from protocol.registry.redis_client import connect

STOP_S = (4.0, 6.0)
"""How long a process stands still: longer than its peers wait for a sign of life."""

CUT_S = (2.0, 6.0)
REDIS_FULL_S = (5.0, 9.0)
"""Leases last 7.5 s."""

REDIS_DOWN_S = 1.0
_WORKER_S = 30.0
_REDIS_MEMORY = "256mb"  # as cluster/local/redis_server.py sets it

Parts = tuple[str, str]  # role, and front or engine


class FaultTarget(NamedTuple):
    """What faults act on, and where they draw from."""

    pool: Standalone
    cutter: LinkCutter | None
    draw: random.Random


class PoolFault(NamedTuple):
    """One kind of fault. ``run`` returns what it has done, for the log."""

    name: str
    run: Callable[[FaultTarget], Awaitable[str]]


def kill_fault(role: str, part: str) -> PoolFault:
    async def run(target: FaultTarget) -> str:
        record = await _draw_worker(target, role)
        with contextlib.suppress(ProcessLookupError):
            os.kill(_pid(record, part), signal.SIGKILL)
        return f"killed the {part} of a {role} worker"

    return PoolFault(f"kill {role} {part}", run)


def stop_fault(role: str, part: str) -> PoolFault:
    async def run(target: FaultTarget) -> str:
        record = await _draw_worker(target, role)
        seconds = target.draw.uniform(*STOP_S)
        async with _stopped(_pid(record, part)):
            await asyncio.sleep(seconds)
        return f"stopped the {part} of a {role} worker for {seconds:.1f} s"

    return PoolFault(f"stop {role} {part}", run)


async def stop_router(target: FaultTarget) -> str:
    seconds = target.draw.uniform(*STOP_S)
    async with _stopped(target.pool.routers[0].pid):
        await asyncio.sleep(seconds)
    return f"stopped the router for {seconds:.1f} s"


async def cut_router_link(target: FaultTarget) -> str:
    assert target.cutter is not None
    record, seconds = await _draw_worker(target, "decode"), target.draw.uniform(*CUT_S)
    async with target.cutter.cut(target.pool.routers[0].pid, record.endpoint, target.draw):
        await asyncio.sleep(seconds)
    return f"cut the router from a decode worker for {seconds:.1f} s"


async def cut_worker_link(target: FaultTarget) -> str:
    assert target.cutter is not None
    decode, prefill = await _draw_worker(target, "decode"), await _draw_worker(target, "prefill")
    seconds = target.draw.uniform(*CUT_S)
    async with target.cutter.cut(decode.pid, prefill.endpoint, target.draw):
        await asyncio.sleep(seconds)
    return f"cut a decode worker from a prefill worker for {seconds:.1f} s"


async def fill_redis(target: FaultTarget) -> str:
    seconds = target.draw.uniform(*REDIS_FULL_S)
    async with connect(target.pool.redis.url) as client:
        try:
            await client.config_set("maxmemory", 1)
            await asyncio.sleep(seconds)
        finally:
            await client.config_set("maxmemory", _REDIS_MEMORY)
    return f"Redis refused writes for {seconds:.1f} s"


async def kill_redis(target: FaultTarget) -> str:
    server = target.pool.redis
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    try:
        await asyncio.sleep(REDIS_DOWN_S)
    finally:
        server.stop()
        server.start()
    return f"Redis died, and came back empty after {REDIS_DOWN_S:g} s"


ROLE_PARTS: list[Parts] = [(r, p) for r in ("prefill", "decode") for p in ("front", "engine")]
KILLS = [kill_fault(*parts) for parts in ROLE_PARTS]
STOPS = [stop_fault(*parts) for parts in ROLE_PARTS]
CUTS = [
    PoolFault("cut router link", cut_router_link),
    PoolFault("cut worker link", cut_worker_link),
]
HARMLESS = [
    PoolFault("stop router", stop_router),
    PoolFault("Redis full", fill_redis),
    PoolFault("kill Redis", kill_redis),
]


def _pid(record: WorkerRecord, part: str) -> int:
    return record.pid if part == "front" else record.engine_pid


async def _draw_worker(target: FaultTarget, role: str) -> WorkerRecord:
    """Return a worker of ``role`` that serves, a busy one if there is one. Redis may be down, and
    after a restart it lists none for a while."""
    async with asyncio.timeout(_WORKER_S):
        while True:
            with contextlib.suppress(redis.RedisError):
                records = await target.pool.records()
                if found := [r for r in records if r.role == role and r.engine_pid]:
                    busy = [r for r in found if r.running or r.waiting]
                    return target.draw.choice(busy or found)
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def _stopped(pid: int) -> AsyncIterator[None]:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
