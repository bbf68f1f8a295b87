"""What the server takes is found out by asking: the most exact dialect that it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import aiohttp

from bench.serve.client import Clock, send
from bench.serve.dialect import Body, Dialect
from bench.serve.plan import Item
from bench.serve.prompts import Prompts
from bench.serve.records import Record
from protocol.errors import StartupError

REFUSALS = (400, 422)
"""Statuses that may mean: not in these words."""


class Target:
    """Where to send, and in which words."""

    def __init__(self, http: aiohttp.ClientSession, url: str, body: Body, prompts: Prompts) -> None:
        self._http = http
        self._url = url
        self._body = body
        self._prompts = prompts

    async def send(self, item: Item, record: Record, clock: Clock) -> None:
        body = self._body.json(self._prompts.json(item.pieces), item.output)
        await send(self._http, self._url, body, record, clock)


async def probe(
    tried: Sequence[Dialect], target: Callable[[Dialect], Target], item: Item
) -> tuple[Dialect, Target]:
    """The first dialect that is answered. Raises StartupError with what the server said to the
    first and the last one."""
    refused: list[str] = []
    for dialect in tried:
        found = target(dialect)
        record = Record(0, 0.0, item.prompt, item.output)
        await found.send(item, record, Clock())
        if record.ok:
            return dialect, found
        refused.append(f"{dialect.says()}: {record.error}: {record.message}")
        if record.status not in REFUSALS:
            break
    lines = "\n  ".join(dict.fromkeys((refused[0], refused[-1])))
    raise StartupError(f"a request to try the server failed:\n  {lines}")
