"""Sends what is planned, when it is due; cancelled, it leaves the records as they stand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from bench.serve.client import Clock
from bench.serve.plan import Item
from bench.serve.records import Record

Send = Callable[[Item, Record], Awaitable[None]]


class Loop:
    """One run. ``records`` are in the order in which requests were due."""

    def __init__(self, send: Send, clock: Clock) -> None:
        self.records: list[Record] = []
        self.in_flight = 0
        self.done = 0
        self.failed = 0
        self._send = send
        self._clock = clock

    async def open(self, items: Iterator[Item], max_in_flight: int) -> None:
        """Each when it is due, whatever has become of those before; but no more than
        ``max_in_flight`` at a time: the next one waits, and its record says so."""
        slots = asyncio.Semaphore(max_in_flight)
        async with asyncio.TaskGroup() as sending:
            for item in items:
                await asyncio.sleep(max(0.0, item.at - self._clock()))
                record = self._record(item, item.at)
                record.held = slots.locked()
                await slots.acquire()
                task = sending.create_task(self._one(item, record))
                task.add_done_callback(lambda _: slots.release())

    async def closed(self, items: Iterator[Item], streams: int, until: float | None) -> None:
        """``streams`` at a time: the next is due when one ends. None is sent after ``until``."""
        async with asyncio.TaskGroup() as sending:
            for _ in range(streams):
                sending.create_task(self._stream(items, until))

    async def _stream(self, items: Iterator[Item], until: float | None) -> None:
        for item in items:
            now = self._clock()
            if until is not None and now >= until:
                return
            await self._one(item, self._record(item, now))

    def _record(self, item: Item, due: float) -> Record:
        record = Record(item.number, due, item.prompt, item.output)
        self.records.append(record)
        return record

    async def _one(self, item: Item, record: Record) -> None:
        self.in_flight += 1
        try:
            await self._send(item, record)
        finally:
            self.in_flight -= 1
            self.done += 1
            self.failed += not record.ok
