"""More requests than the cluster can serve: goodput at 1, 3 and 10 times what it sustains.

    python -m bench.overload [--seed N] [--queue-ms MS]

Two prefill and two decode workers; prompts that share nothing. What they sustain is measured in a
closed loop; then requests come evenly, at multiples of that, in rounds that take turns. Goodput:
requests per second that meet both objectives. The router bounds the queue below the objective
(``--admission-queue-ms``), as who wants goodput should. At last: half the load, ten times, half the
load again; the service is normal from where on, of any ten requests in a row, nine or more are
answered within the objectives. The client runs on the same machine, and has its share of it at ten
times the load.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import tempfile
from collections.abc import Sequence
from math import inf
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

from bench.mooncake import VOCAB, Arrival
from bench.open_loop import Answer, Objective, closed_loop, open_loop
from bench.report import Row, finish, percentile
from bench.standalone import Standalone

LOADS = (1, 3, 10)
ROUNDS = 3
SEGMENT_S = 8.0
CALM = 0.5
CALM_S = 15.0
GOAL = Objective(1.0, 0.05)
PROMPT, OUTPUT = 512, 64
STREAMS = 16
RUN = 10
"""Requests in a row by which service is said to be normal."""
QUEUE_MS = 500.0
WORKER = ("--kv-tokens", "32768", "--max-model-len", "4096")


class Segment(NamedTuple):
    """What became of the requests of one load."""

    goodput: float
    answered: float  # per second
    refused: list[float]  # latencies, s
    broken: int  # neither answered nor refused
    ttft: list[float]


def summary(answers: Sequence[Answer], seconds: float) -> Segment:
    ok = [a for a in answers if a.status == 200]
    refused = [a.ended_s for a in answers if a.status == 429]
    return Segment(
        sum(a.meets(GOAL) for a in ok) / seconds,
        len(ok) / seconds,
        refused,
        len(answers) - len(ok) - len(refused),
        [a.ttft_s for a in ok] or [inf],
    )


class Load:
    """Requests of random tokens, evenly spaced, none like another."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._draw = Random(seed)

    def arrivals(self, rate: float, seconds: float) -> list[Arrival]:
        return [Arrival(i / rate, self._prompt(), OUTPUT) for i in range(round(rate * seconds))]

    async def send(self, arrivals: Sequence[Arrival]) -> list[Answer]:
        return await open_loop(self._url, arrivals, secrets.token_hex(8))

    async def sustained(self, seconds: float) -> float:
        """Requests per second."""
        requests = self.arrivals(100, seconds)
        return await closed_loop(self._url, requests, secrets.token_hex(8), STREAMS, seconds)

    def _prompt(self) -> list[int]:
        return [self._draw.randrange(3, VOCAB) for _ in range(PROMPT)]


async def sweep(load: Load, capacity: float) -> dict[int, list[Segment]]:
    results: dict[int, list[Segment]] = {times: [] for times in LOADS}
    for turn in range(ROUNDS):
        for times in LOADS[turn:] + LOADS[:turn]:
            answers = await load.send(load.arrivals(times * capacity, SEGMENT_S))
            segment = summary(answers, SEGMENT_S)
            results[times].append(segment)
            print(f"{times}x: {_line(segment)}", flush=True)
    return results


def _line(s: Segment) -> str:
    refused = f", refused in {1e3 * percentile(s.refused, 0.5):.0f} ms" if s.refused else ""
    return (
        f"goodput {s.goodput:.1f}/s, answered {s.answered:.1f}/s, TTFT p50"
        f" {percentile(s.ttft, 0.5):.2f} s{refused}, broken {s.broken}"
    )


async def recovery(load: Load, capacity: float) -> tuple[float, float, float]:
    """Seconds from the end of the overload to normal service, and the medians of TTFT in the calm
    before and after."""
    rate = CALM * capacity
    before = summary(await load.send(load.arrivals(rate, CALM_S / 2)), CALM_S / 2)
    storm = load.arrivals(LOADS[-1] * capacity, SEGMENT_S)
    calm = [a._replace(at=a.at + SEGMENT_S) for a in load.arrivals(rate, CALM_S)]
    after = [a for a in await load.send([*storm, *calm]) if a.at >= SEGMENT_S]
    normal = normal_after([a.meets(GOAL) for a in after]) / rate
    return normal, median(before.ttft), median(a.ttft_s for a in after if a.status == 200)


def normal_after(met: Sequence[bool]) -> int:
    """Requests until the end of the last ten in a row of which more than one was not ``met``."""
    ends = range(RUN, len(met) + 1)
    return max((end for end in ends if met[end - RUN : end].count(False) > 1), default=0)


def rows(capacity: float, results: dict[int, list[Segment]]) -> list[Row]:
    peaks = [max(s.goodput for s in turn) for turn in zip(*results.values(), strict=True)]
    found = [Row("closed loop", capacity, "requests/s")]
    for times, segments in results.items():
        refused = [latency for s in segments for latency in s.refused]
        ttft = median(percentile(s.ttft, 0.9) for s in segments)
        goodput = median(s.goodput for s in segments)
        of_peak = median(s.goodput / peak for s, peak in zip(segments, peaks, strict=True))
        found += [
            Row(f"{times}x: goodput", goodput, "requests/s", "peak of its round", of_peak),
            Row(f"{times}x: TTFT p90 of the admitted", 1e3 * ttft, "ms"),
            Row(f"{times}x: neither answered nor refused", sum(s.broken for s in segments), ""),
        ]
        if refused:
            found += [
                Row(f"{times}x: refusal p50", 1e3 * percentile(refused, 0.5), "ms"),
                Row(f"{times}x: refusal p99", 1e3 * percentile(refused, 0.99), "ms"),
            ]
    return found


async def run(seed: int, queue_ms: float) -> None:
    goal = ("--ttft-slo-ms", f"{1e3 * GOAL.ttft_s:g}", "--tpot-slo-ms", f"{1e3 * GOAL.tpot_s:g}")
    router = (*goal, "--admission-queue-ms", f"{queue_ms:g}")
    with tempfile.TemporaryDirectory(prefix="baton-overload-") as folder:
        pool = Standalone(Path(folder), worker_options=WORKER, router_options=router)
        try:
            await pool.start()
            load = Load(pool.url, seed)
            await load.sustained(4.0)  # the router learns
            capacity = await load.sustained(8.0)
            print(f"sustained: {capacity:.1f} requests/s", flush=True)
            results = await sweep(load, capacity)
            normal_s, before_s, after_s = await recovery(load, capacity)
        finally:
            await pool.close()
    found = rows(capacity, results)
    found += [
        Row("normal again after", normal_s, "s"),
        Row("TTFT p50 in the calm before", 1e3 * before_s, "ms"),
        Row("TTFT p50 in the calm after", 1e3 * after_s, "ms", "before", before_s / after_s),
    ]
    finish("overload", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--queue-ms", type=float, default=QUEUE_MS)
    options = parser.parse_args()
    asyncio.run(run(options.seed, options.queue_ms))


if __name__ == "__main__":
    main()
