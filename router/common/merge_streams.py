"""Several streams as one, in the order in which things come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


async def merged(sources: Sequence[AsyncIterator[Item]]) -> AsyncGenerator[list[Item]]:
    """What has come since the last look, until all sources have ended.

    Raises what the first source raises. As many items wait as there are sources: a reader who is
    slow makes the sources wait. To be closed (``aclosing``) if it is left early.
    """
    if len(sources) == 1:
        async for item in sources[0]:
            yield [item]
        return
    queue: asyncio.Queue[Item | Exception | None] = asyncio.Queue(len(sources))
    pumps = [asyncio.create_task(_pump(source, queue)) for source in sources]
    running = len(pumps)
    try:
        while running:
            came = [await queue.get()]
            while not queue.empty():
                came.append(queue.get_nowait())
            items: list[Item] = []
            for what in came:
                if isinstance(what, Exception):
                    raise what
                if what is None:
                    running -= 1
                else:
                    items.append(what)
            if items:
                yield items
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(source: AsyncIterator[Item], queue: asyncio.Queue[Item | Exception | None]) -> None:
    try:
        async for item in source:
            await queue.put(item)
        await queue.put(None)
    except Exception as error:
        await queue.put(error)
