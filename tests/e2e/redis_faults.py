"""What can befall the Redis of a pool."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from bench.lib.standalone import Standalone
from protocol.registry.redis_client import connect

Fault: TypeAlias = Callable[[Standalone], Coroutine[Any, Any, None]]


async def killed(pool: Standalone) -> None:
    assert pool.redis.pid is not None
    os.kill(pool.redis.pid, signal.SIGKILL)
    await asyncio.sleep(1.0)
    pool.redis.start()


async def flushed(pool: Standalone) -> None:
    async with connect(pool.redis.url) as client:
        await client.flushall()


async def stalled(pool: Standalone) -> None:
    # Of this kind of connection nobody waits for the reply.
    async with connect(pool.redis.url) as client, client.pubsub() as raw:
        await raw.execute_command("DEBUG", "SLEEP", "5")
        await asyncio.sleep(5)


async def garbled(pool: Standalone) -> None:
    """For a second, all keys hold noise, of their own type and of others."""
    async with connect(pool.redis.url) as client:
        for turn in range(8):
            for key in await client.keys():
                kind = await client.type(key)
                if turn % 2:
                    await client.set(key, os.urandom(100))
                elif kind == b"stream":
                    await client.xadd(key, {"x": os.urandom(99)}, id="18446744073709551615-1")
                elif kind == b"set":
                    await client.sadd(key, os.urandom(9), "f" * 32)
                else:
                    async with client.pipeline(transaction=True) as both:  # workers write, too
                        await both.delete(key).rpush(key, os.urandom(99)).execute()
            await asyncio.sleep(0.15)


FAULTS: list[Fault] = [killed, flushed, stalled, garbled]
