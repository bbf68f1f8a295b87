"""Streams through a pool whose processes are killed at random moments.

    python -m bench.chaos --minutes N

In each round two of the pool's processes, fronts or engines of either role, get ``kill -9``; every
stream must have the text of one undisturbed engine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.lib.oracle import (
    BUSY_ROUTER,
    EXACT,
    Oracle,
    StreamRecord,
    kill,
    requests,
    streams,
    wrong,
)
from bench.lib.report import percentile
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
    total = sum(r.sampling.max_tokens for r in asked)
    shares = sorted(draw.uniform(0.0, 0.5) for _ in kinds)
    for share, (role, part) in zip(shares, sorted(kinds, reverse=True), strict=True):
        while sum(len(s.tokens) for s in seen) < share * total:
            await asyncio.sleep(0.01)
        await kill(pool, role, part, draw)
    return await running


async def soak(minutes: float, seed: int) -> int:
    """Run rounds for ``minutes``, and return the number of streams that went wrong."""
    oracle, failed, total, waits = Oracle(), 0, 0, []
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="baton-chaos-") as folder:
        pool = Standalone(Path(folder), worker_options=EXACT, router_options=BUSY_ROUTER)
        try:
            await pool.start()
            end = time.monotonic() + 60 * minutes
            while time.monotonic() < end:
                asked = requests(draw.randrange(1 << 30))
                kinds = draw.sample(KINDS, 2)  # a third death would rightly end a request
                got = await run_with_kills(pool, asked, kinds, draw.randrange(1 << 30))
                faults = wrong(got, oracle(asked))
                failed, total = failed + len(faults), total + len(got)
                waits += [s.longest_wait_s for s in got]
                p50, p99 = percentile(waits, 0.5), percentile(waits, 0.99)
                print(
                    f"{kinds}: {total} streams, {failed} wrong; wait {p50:.1f} s, {p99:.1f} s p99"
                )
                print(*faults, sep="\n", end="\n" if faults else "")
                await pool.whole()
        finally:
            await pool.close()
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    raise SystemExit(bool(asyncio.run(soak(options.minutes, options.seed))))


if __name__ == "__main__":
    main()
