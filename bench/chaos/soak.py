"""The rounds of the soak.

    round: streams, two deadly faults, perhaps a harmless one --> every text is checked
    every other round: other clients stop --> rest: nothing may be held --> sizes are measured

A stream is *refused* when it gets 429 or 503 with nothing of its text: its client may come again.
It is *lost* when it was accepted and ends without its finish, *wrong* when it has another text.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.chaos.cut_links import LinkCutter
from bench.chaos.faults import CUTS, HARMLESS, KILLS, STOPS, FaultTarget, PoolFault
from bench.chaos.kills import until_share
from bench.chaos.leaks import ProcessHistory, ProcessSizes, left_over
from bench.chaos.tenants import MAIN_KEY, SideClients, SideCounts, key_header, write_keys
from bench.lib.oracle import BUSY_ROUTER, EXACT, Oracle, StreamRecord, requests, streams
from bench.lib.standalone import Standalone
from protocol.requests import Request

STREAMS = 32
DEADLY = 2
HARMLESS_SHARE = 0.75
ROUNDS_TO_REST = 2
WHOLE_S = 90.0


@dataclass
class SoakResult:
    """What has been counted so far. ``faults`` are sentences; any fails the soak."""

    rounds: int = 0
    streams: int = 0
    wrong: int = 0
    lost: int = 0
    refused: int = 0
    waits: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)  # kinds of faults
    histories: list[ProcessHistory] = field(default_factory=list)
    side: SideCounts = field(default_factory=SideCounts)

    def check(self, got: Sequence[StreamRecord], texts: Sequence[Sequence[int]]) -> list[str]:
        """Count the streams of one round; return a sentence for each that is wrong or lost."""
        said = []
        for i, (seen, text) in enumerate(zip(got, texts, strict=True)):
            self.waits.append(seen.longest_wait_s)
            if seen.done and seen.tokens == list(text):
                continue
            if not seen.tokens and seen.error.startswith(("429", "503")):
                self.refused += 1
                continue
            is_wrong = seen.tokens != list(text[: len(seen.tokens)])
            self.wrong, self.lost = self.wrong + is_wrong, self.lost + (not is_wrong)
            kind = "wrong" if is_wrong else "lost"
            ended = seen.error or f"done={seen.done}, without an error"
            said.append(f"stream {i} {kind}: {len(seen.tokens)} of {len(text)} tokens, {ended}")
        self.streams += len(got)
        self.faults += said
        return said


async def soak(minutes: float, seed: int, folder: Path, cutter: LinkCutter | None) -> SoakResult:
    """Run rounds for ``minutes``. ``folder`` takes logs and must have a short path."""
    draw = random.Random(seed)
    router = (*BUSY_ROUTER, "--api-keys", str(write_keys(folder)))
    pool = Standalone(folder, worker_options=EXACT, router_options=router)
    result = SoakResult()
    side = SideClients(pool.url, draw)
    try:
        await pool.start()
        await _rounds(60 * minutes, FaultTarget(pool, cutter, draw), side, result)
    finally:
        await side.close()
        await pool.close()
    if left := pool.left():
        result.faults.append(f"processes are left: {left}")
    result.faults += side.counts.check_service()
    result.side = side.counts
    return result


async def _rounds(
    seconds: float, target: FaultTarget, side: SideClients, result: SoakResult
) -> None:
    oracle, sizes = Oracle(), ProcessSizes(target.pool)
    end = time.monotonic() + seconds
    side.start()
    while time.monotonic() < end:
        await _round(target, oracle, result)
        if result.rounds % ROUNDS_TO_REST == 0:
            await _rest(target.pool, side, sizes, result)
            side.start()
    await _rest(target.pool, side, sizes, result)
    result.histories = list(sizes.histories.values())
    result.faults += sizes.faults()


async def _round(target: FaultTarget, oracle: Oracle, result: SoakResult) -> None:
    draw, pool = target.draw, target.pool
    asked = requests(draw.randrange(1 << 30), STREAMS)
    kinds = draw.sample([*KILLS, *STOPS, *(CUTS if target.cutter else ())], DEADLY)
    if draw.random() < HARMLESS_SHARE:
        kinds.append(draw.choice(HARMLESS))
    seen = [StreamRecord() for _ in asked]
    headers = key_header(MAIN_KEY)
    running = asyncio.create_task(streams(pool.url, asked, f"{result.rounds}", seen, headers))
    befallen = [
        asyncio.create_task(_fault(kind, draw.uniform(0.0, 0.5), target, asked, seen, running))
        for kind in kinds
    ]
    outcomes = await asyncio.gather(*befallen)
    got = await running
    result.rounds += 1
    result.done += [kind.name for kind in kinds]
    said = result.check(got, await asyncio.to_thread(oracle, asked))
    longest = max(s.longest_wait_s for s in got)
    print(f"round {result.rounds}: {'; '.join(outcomes)}; longest wait {longest:.1f} s", flush=True)
    for sentence in said:
        print(f"  {sentence}", flush=True)
    await pool.whole(WHOLE_S)


async def _fault(
    kind: PoolFault,
    share: float,
    target: FaultTarget,
    asked: Sequence[Request],
    seen: Sequence[StreamRecord],
    running: asyncio.Task[list[StreamRecord]],
) -> str:
    """Do ``kind`` to the pool once ``share`` of the tokens have come: then it has work, however
    fast the machine is."""
    await until_share(asked, seen, share, running)
    return await kind.run(target)


async def _rest(
    pool: Standalone, side: SideClients, sizes: ProcessSizes, result: SoakResult
) -> None:
    """Let the pool come to rest, and look at what it still holds."""
    await side.close()
    await pool.whole(WHOLE_S)
    held = await left_over(pool)
    for text in held:
        print(f"  held at rest: {text}", flush=True)
    result.faults += [f"after round {result.rounds}: {text}" for text in held]
    await sizes.measure()
