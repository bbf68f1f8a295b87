"""Requests to the routers of a pool, and what they know of caches."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp

from bench.lib.standalone import Standalone

_ENTRIES = re.compile(r"^baton_index_entries(?:{.*})? (\S+)$", re.MULTILINE)


def prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 4096) for _ in range(tokens)]


class Asker:
    """A client with an API key. ``router``: its number."""

    def __init__(self, pool: Standalone, session: aiohttp.ClientSession, key: str) -> None:
        self._pool = pool
        self._session = session
        self._headers = {"authorization": f"Bearer {key}", "x-baton-explain": "1"}

    async def ask(
        self, tokens: Sequence[int], router: int = 0, count: int = 4, **fields: Any
    ) -> dict[str, Any]:
        """A greedy completion of ``count`` tokens, with its explanation."""
        body = {"model": "baton-demo", "prompt": list(tokens), "max_tokens": count, **fields}
        async with self._session.post(
            f"{self._pool.urls[router]}/v1/completions",
            json={"temperature": 0, "ignore_eos": True, "return_token_ids": True, **body},
            headers=self._headers,
        ) as reply:
            assert reply.status == 200, await reply.text()
            return await reply.json()  # type: ignore[no-any-return]

    async def entries(self, router: int) -> int:
        """Blocks in the router's index, each once, however many workers hold it."""
        url = f"{self._pool.urls[router]}/metrics"
        async with self._session.get(url, headers=self._headers) as reply:
            found = _ENTRIES.search(await reply.text())
        assert found is not None
        return int(float(found[1]))

    async def told(self, least: int, within_s: float = 10.0) -> int:
        """Wait until all routers know the same, this much at least, and it stays so. How much."""
        last = -1
        async with asyncio.timeout(within_s):
            while not (last >= least and await self._entries() == {last}):
                last = min(await self._entries())
                await asyncio.sleep(0.1)  # three times what a worker waits for more to tell
        return last

    async def _entries(self) -> set[int]:
        return {await self.entries(i) for i in range(len(self._pool.urls))}


def candidates(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """What the router chose from, at the first attempt."""
    return list(answer["baton"]["attempts"][0]["candidates"])


def cached(answer: dict[str, Any]) -> int:
    """Tokens of the prompt that were found."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def predicted_cached(answer: dict[str, Any]) -> int:
    """Tokens of the prompt that the router knew to be cached somewhere."""
    offered = candidates(answer)
    return max(int(c[f"{role}_cached_tokens"]) for c in offered for role in ("prefill", "decode"))


def promised(answer: dict[str, Any]) -> int:
    """Tokens of the prompt that the router took to be cached at the workers it chose."""
    chosen = answer["baton"]["attempts"][0]["chosen"]
    return max(int(chosen["prefill_cached_tokens"]), int(chosen["decode_cached_tokens"]))


class Sent(NamedTuple):
    """One request of the traffic."""

    began: float
    seconds: float
    known: int  # tokens of the prompt that its router knew to be cached somewhere
    counted: int  # that it counted on at the workers it chose: another may be the quicker one
    cached: int  # that were

    def hits(self, prefix: int) -> bool:
        """The router knew of the prefix, and what it counted on was there."""
        return self.known == prefix and self.cached >= self.counted


class Traffic:
    """Clients that ask all routers for prompts under a few prefixes, until told to stop.

    Tails are shorter than a block, so that what is cached stays the same."""

    def __init__(self, asker: Asker, prefixes: Sequence[list[int]], routers: int) -> None:
        self._asker = asker
        self._prefixes = prefixes
        self._routers = routers
        self._over = False
        self._clients: list[asyncio.Task[None]] = []
        self.sent: list[Sent] = []

    async def __aenter__(self) -> Traffic:
        self._clients = [asyncio.create_task(self._client(i)) for i in range(3)]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Raises what a request raised."""
        self._over = True
        await asyncio.gather(*self._clients)

    async def _client(self, i: int) -> None:
        draw = random.Random(i)
        turn = i
        while not self._over:
            turn += 1
            tokens = [*draw.choice(self._prefixes), *prompt(draw.getrandbits(30), 20)]
            began = time.monotonic()
            answer = await self._asker.ask(tokens, turn % self._routers)
            took_s = time.monotonic() - began
            counted = predicted_cached(answer), promised(answer), cached(answer)
            self.sent.append(Sent(began, took_s, *counted))
            await asyncio.sleep(0.03)
