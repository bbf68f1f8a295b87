"""One front in a process of its own, which a test kills or stops.

    python -m tests.kvtransfer.front_process prefill              prints its endpoint
    python -m tests.kvtransfer.front_process decode ENDPOINT      prints "receiving"

Prompts of an odd number of blocks are never computed, and of the others two frames are held back,
so that a transfer is idle or flows until the signal comes. A decode front empties no slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator

from protocol.errors import TransferFailed
from tests.kvtransfer.fronts import CARRIERS, Front, Receiving, make_carrier, receiving, started

IDLE, FLOWING = 41, 40  # blocks

ALL_CARRIERS = (*CARRIERS, "nccl")


async def prefill() -> None:
    front = endless_prefill_front()
    async with started(front):
        print(front.endpoint, flush=True)
        await asyncio.sleep(60)


def endless_prefill_front() -> Front:
    """A front with every carrier, whose transfers do not end."""
    front = Front([make_carrier(name) for name in ALL_CARRIERS], slots=32)
    front.engine.faults.held_back = 2
    front.engine.computes = lambda blocks: blocks % 2 == 0
    return front


async def decode(endpoint: str) -> None:
    fronts = [Front([make_carrier(name)], instance="d") for name in ALL_CARRIERS]
    async with started(*fronts):
        for front in fronts:
            front.engine.reads = False
        transfers = [receiving(front, blocks) for front in fronts for blocks in (IDLE, FLOWING)]
        running = [asyncio.create_task(t.run(endpoint, frame_s=60)) for t in transfers]
        await asyncio.gather(*(t.running.wait() for t in transfers))
        await flowing(transfers)
        print("receiving", flush=True)
        with contextlib.suppress(TransferFailed):
            await asyncio.gather(*running)


async def flowing(transfers: list[Receiving]) -> None:
    """Wait until frames of the transfers that are to flow have come."""
    async with asyncio.timeout(5):
        while not all(
            t.inbound is not None and t.inbound.frames for t in transfers if t.blocks == FLOWING
        ):
            await asyncio.sleep(0.01)


class Child:
    """A front in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(15):
            return (await self.process.stdout.readline()).decode().strip()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@contextlib.asynccontextmanager
async def child(*arguments: str) -> AsyncIterator[Child]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.kvtransfer.front_process", *arguments),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Child(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


if __name__ == "__main__":
    asyncio.run(prefill() if sys.argv[1] == "prefill" else decode(sys.argv[2]))
