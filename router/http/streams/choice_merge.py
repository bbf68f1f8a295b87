"""Joins the choices of one response: their streams into one, and the best of the finished ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from itertools import groupby
from typing import TypeVar

from router.openai.answers.formatter import FinishedChoice

Item = TypeVar("Item")


def best_choices(
    choices: Sequence[FinishedChoice], n: int, candidates: int
) -> list[FinishedChoice]:
    """Return the ``n`` best of each prompt's ``candidates``, best first, with new indexes.

    The best has the greatest log-probability per token, as in OpenAI's ``best_of``.
    """
    if n == candidates:
        return list(choices)
    kept = []
    for _, group in groupby(choices, lambda choice: choice.choice // candidates):
        kept += sorted(group, key=lambda choice: -choice.logprob)[:n]
    return [choice._replace(choice=index) for index, choice in enumerate(kept)]


async def merge_streams(sources: Sequence[AsyncIterator[Item]]) -> AsyncGenerator[list[Item]]:
    """Yield what has arrived from any source since the last item, until all sources have ended.

    Raises what the first source raises. The queue holds as many items as there are sources: a slow
    reader makes the sources wait. Close it (``aclosing``) when it is left early.
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
            entries = [await queue.get()]
            while not queue.empty():
                entries.append(queue.get_nowait())
            items: list[Item] = []
            for entry in entries:
                if isinstance(entry, Exception):
                    raise entry
                if entry is None:
                    running -= 1
                else:
                    items.append(entry)
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
