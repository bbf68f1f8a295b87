"""Runs streams while processes of their pool are killed. The soak and tests use it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from bench.lib.oracle import StreamRecord, kill, streams
from bench.lib.standalone import Standalone
from protocol.requests import Request

KINDS = [(role, part) for role in ("prefill", "decode") for part in ("front", "engine")]


async def run_with_kills(
    pool: Standalone, asked: Sequence[Request], kinds: Sequence[tuple[str, str]], seed: int
) -> list[StreamRecord]:
    """Run the streams and kill one process of each of ``kinds`` at a random moment.

    The moment is when a random share of the tokens has come, so that the process has work however
    fast the machine is.
    """
    draw = random.Random(seed)
    seen = [StreamRecord() for _ in asked]
    running = asyncio.create_task(streams(pool.url, asked, f"{seed}{kinds}", seen))
    shares = sorted(draw.uniform(0.0, 0.5) for _ in kinds)
    for share, (role, part) in zip(shares, sorted(kinds, reverse=True), strict=True):
        await until_share(asked, seen, share, running)
        await kill(pool, role, part, draw)
    return await running


async def until_share(
    asked: Sequence[Request],
    seen: Sequence[StreamRecord],
    share: float,
    running: asyncio.Task[list[StreamRecord]],
) -> None:
    """Wait until ``share`` of all tokens have come, or until the streams have ended."""
    total = sum(r.sampling.max_tokens for r in asked)
    while sum(len(s.tokens) for s in seen) < share * total and not running.done():
        await asyncio.sleep(0.01)
