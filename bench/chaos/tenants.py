"""Clients of the soak beside its checked streams: a flood, huge prompts, slow and vanishing ones.

They run all the time. What they get is counted, and a surprise is a fault of the soak.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from bench.lib.report import percentile

MAIN_KEY, FLOOD_KEY, OTHER_KEY = "sk-chaos-main", "sk-chaos-flood", "sk-chaos-others"
KEYS = f"""\
{MAIN_KEY}:
  tenant: main
  weight: 4
  scopes: [generate, monitor, admin]
{FLOOD_KEY}:
  tenant: flood
  concurrency: 8
  requests_per_minute: 1200
{OTHER_KEY}: others
"""

FLOOD_CLIENTS = 12
HUGE_BYTES = 8 << 20
HUGE_PAUSE_S = 3.0
HUGE_LIMIT_S = 2.0
"""Median time of such a refusal. Single ones meet a router that stands still."""

_PAUSE_S = 0.05
_TIMEOUT_S = 120.0


def write_keys(folder: Path) -> Path:
    """Write the file of API keys, which only its owner may read."""
    path = folder / "keys.yaml"
    path.touch(mode=0o600)
    path.write_text(KEYS)
    return path


def key_header(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@dataclass
class SideCounts:
    """What the other clients got. ``faults`` are sentences."""

    answers: Counter[str] = field(default_factory=Counter)
    huge_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def check_service(self) -> list[str]:
        """Return what the other clients got and should not have, or did not get."""
        found = list(self.faults)
        if self.huge_s and (p50 := percentile(self.huge_s, 0.5)) > HUGE_LIMIT_S:
            found.append(f"prompts of 8 MiB were refused after {p50:.1f} s (median)")
        if not self.answers["flood: 429"]:
            found.append("the flood was never refused, although it is over its limits")
        missing = [
            kind for kind in ("flood", "slow", "vanishing") if not self.answers[f"{kind}: 200"]
        ]
        return found + [f"no client of the kind {kind!r} was served" for kind in missing]


class SideClients:
    """The clients beside the checked streams: ``start`` -> they run -> ``close``."""

    def __init__(self, url: str, draw: random.Random) -> None:
        self.counts = SideCounts()
        self._url = f"{url}/v1/completions"
        self._draw = draw
        self._huge = _huge_body()
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None

    def start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
        )
        clients = [*[self._flood] * FLOOD_CLIENTS, self._huge_prompt, self._slow, self._vanish]
        self._tasks = [asyncio.create_task(self._again(client)) for client in clients]

    async def close(self) -> None:
        """End all of them, in the middle of what they do."""
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        bugs = [error for error in ended if isinstance(error, Exception)]
        self.counts.faults += [f"a client ended by {error!r}" for error in bugs]
        self._tasks = []
        if self._session is not None:
            await self._session.close()

    async def _again(self, client: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await client()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self.counts.answers[f"{client.__name__[1:]}: {type(error).__name__}"] += 1
            await asyncio.sleep(_PAUSE_S)

    def _post(self, body: bytes, key: str = OTHER_KEY) -> Any:
        assert self._session is not None
        headers = {**key_header(key), "content-type": "application/json"}
        return self._session.post(self._url, data=body, headers=headers)

    def _body(self, tokens: int) -> bytes:
        body = {
            "model": "baton-demo",
            "prompt": [self._draw.randrange(3, 4096) for _ in range(100)],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
        return msgspec.json.encode(body)

    async def _flood(self) -> None:
        async with self._post(self._body(32), FLOOD_KEY) as response:
            await response.read()
            self.counts.answers[f"flood: {response.status}"] += 1
            if response.status == 429 and "retry-after" not in response.headers:
                self.counts.faults.append("a 429 came without Retry-After")

    async def _huge_prompt(self) -> None:
        began = time.monotonic()
        async with self._post(self._huge) as response:
            await response.read()
            self.counts.answers[f"huge prompt: {response.status}"] += 1
            if response.status < 400 or response.status == 500:
                self.counts.faults.append(f"a prompt of 8 MiB got {response.status}")
        self.counts.huge_s.append(time.monotonic() - began)
        await asyncio.sleep(HUGE_PAUSE_S)

    async def _slow(self) -> None:
        async with self._post(self._body(48)) as response:
            async for _ in response.content:
                await asyncio.sleep(0.1)
            self.counts.answers[f"slow: {response.status}"] += 1

    async def _vanish(self) -> None:
        async with self._post(self._body(400)) as response:
            left = self._draw.randrange(1, 40)  # lines
            async for _ in response.content:
                left -= 1
                if not left:
                    break
            self.counts.answers[f"vanishing: {response.status}"] += 1
            response.close()


def _huge_body() -> bytes:
    """Return a completion whose text nearly fills the largest body that a router reads."""
    head, tail = b'{"model": "baton-demo", "max_tokens": 1, "prompt": "', b'"}'
    return head + b"word " * ((HUGE_BYTES - len(head) - len(tail)) // 5) + tail
