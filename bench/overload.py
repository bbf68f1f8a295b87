"""More requests than the cluster can serve: goodput at 1, 3 and 10 times what it sustains.

    python -m bench.overload [--seed N] [--queue-ms MS]

Two prefill and two decode workers serve prompts that share no prefix. A closed loop measures what
they sustain; then requests come evenly spaced, at multiples of that, in rounds that take turns.
Goodput is requests per second that meet both objectives. The router runs with its defaults, unless
``--queue-ms`` bounds its queue (``--admission-queue-ms``). The last run has half the load, ten
times the load and half the load again: service is normal again when, of any ten requests in a row,
at least nine meet the objectives. The client has a core of its own where there are enough
(``LEAST_CORES``).

Aims: at ten times the load, GOODPUT_AIM of the peak and refusals within REFUSAL_AIM_MS (p99).
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

from bench.lib.http_load import (
    Arrival,
    LoadClient,
    Objective,
    StreamTiming,
    leave_client_core,
    take_client_core,
)
from bench.lib.report import ResultRow, finish, percentile
from bench.lib.standalone import Standalone

LOADS = (1, 3, 10)
ROUNDS = 3
SEGMENT_S = 8.0
CALM = 0.5
CALM_S = 15.0
GOAL = Objective(1.0, 0.05)
PROMPT, OUTPUT = 512, 64
FIRST_ID, VOCAB = 3, 4096
STREAMS = 16
RUN = 10
"""Number of requests in a row that decide whether service is normal."""
GOODPUT_AIM = 0.9
REFUSAL_AIM_MS = 100.0
WORKER = ("--kv-tokens", "32768", "--max-model-len", "4096")


class OverloadSegment(NamedTuple):
    """Results of the requests of one load."""

    goodput: float
    answered: float  # per second
    refused: list[float]  # latencies, s
    broken: int  # neither answered nor refused
    ttft: list[float]


def summary(answers: Sequence[StreamTiming], seconds: float) -> OverloadSegment:
    ok = [a for a in answers if a.status == 200]
    refused = [a.ended_s for a in answers if a.status == 429]
    return OverloadSegment(
        sum(a.meets(GOAL) for a in ok) / seconds,
        len(ok) / seconds,
        refused,
        len(answers) - len(ok) - len(refused),
        [a.ttft_s for a in ok] or [inf],
    )


class OverloadTraffic:
    """Draws evenly spaced requests of random tokens that share no prefix, and sends them."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._draw = Random(seed)

    def arrivals(self, rate: float, seconds: float) -> list[Arrival]:
        return [Arrival(i / rate, self._prompt(), OUTPUT) for i in range(round(rate * seconds))]

    async def send(self, arrivals: Sequence[Arrival]) -> list[StreamTiming]:
        return await self._client().open_loop(arrivals)

    async def sustained(self, seconds: float) -> float:
        """Return the requests per second that a closed loop sustains."""
        found = await self._client().closed_loop(self.arrivals(100, seconds), STREAMS, seconds)
        return found.rate

    def _client(self) -> LoadClient:
        return LoadClient(self._url, salt=secrets.token_hex(8))

    def _prompt(self) -> list[int]:
        return [self._draw.randrange(FIRST_ID, VOCAB) for _ in range(PROMPT)]


async def sweep(load: OverloadTraffic, capacity: float) -> dict[int, list[OverloadSegment]]:
    results: dict[int, list[OverloadSegment]] = {times: [] for times in LOADS}
    for turn in range(ROUNDS):
        for times in LOADS[turn:] + LOADS[:turn]:
            answers = await load.send(load.arrivals(times * capacity, SEGMENT_S))
            segment = summary(answers, SEGMENT_S)
            results[times].append(segment)
            print(f"{times}x: {_line(segment)}", flush=True)
    return results


def _line(s: OverloadSegment) -> str:
    refused = f", refused in {1e3 * percentile(s.refused, 0.5):.0f} ms" if s.refused else ""
    return (
        f"goodput {s.goodput:.1f}/s, answered {s.answered:.1f}/s, TTFT p50"
        f" {percentile(s.ttft, 0.5):.2f} s{refused}, broken {s.broken}"
    )


async def recovery(load: OverloadTraffic, capacity: float) -> tuple[float, float, float]:
    """Return the seconds from the end of the overload to normal service, and two medians of TTFT:
    at half the load before the overload and after it."""
    rate = CALM * capacity
    before = summary(await load.send(load.arrivals(rate, CALM_S / 2)), CALM_S / 2)
    storm = load.arrivals(LOADS[-1] * capacity, SEGMENT_S)
    calm = [a._replace(at=a.at + SEGMENT_S) for a in load.arrivals(rate, CALM_S)]
    after = [a for a in await load.send([*storm, *calm]) if a.at >= SEGMENT_S]
    normal = normal_after([a.meets(GOAL) for a in after]) / rate
    return normal, median(before.ttft), median(a.ttft_s for a in after if a.status == 200)


def normal_after(met: Sequence[bool]) -> int:
    """Count the requests up to the last ten in a row of which more than one was not ``met``."""
    ends = range(RUN, len(met) + 1)
    return max((end for end in ends if met[end - RUN : end].count(False) > 1), default=0)


def rows(capacity: float, results: dict[int, list[OverloadSegment]]) -> list[ResultRow]:
    peaks = [max(s.goodput for s in turn) for turn in zip(*results.values(), strict=True)]
    found = [ResultRow("closed loop", capacity, "requests/s")]
    for times, segments in results.items():
        refused = [latency for s in segments for latency in s.refused]
        ttft = median(percentile(s.ttft, 0.9) for s in segments)
        goodput = median(s.goodput for s in segments)
        of_peak = median(s.goodput / peak for s, peak in zip(segments, peaks, strict=True))
        found += [
            ResultRow(f"{times}x: goodput", goodput, "requests/s", "peak of its round", of_peak),
            ResultRow(f"{times}x: TTFT p90 of the admitted", 1e3 * ttft, "ms"),
            ResultRow(
                f"{times}x: neither answered nor refused", sum(s.broken for s in segments), ""
            ),
        ]
        if refused:
            found += _refusal_rows(times, refused)
        if times == LOADS[-1]:
            aim = ResultRow(
                f"{times}x: goodput of its peak", of_peak, "", "aim", of_peak / GOODPUT_AIM
            )
            found.append(aim)
    return found


def _refusal_rows(times: int, refused: Sequence[float]) -> list[ResultRow]:
    p50, p99 = (1e3 * percentile(refused, share) for share in (0.5, 0.99))
    return [
        ResultRow(f"{times}x: refusal p50", p50, "ms"),
        ResultRow(f"{times}x: refusal p99", p99, "ms", "aim", REFUSAL_AIM_MS / p99),
    ]


def missed_aims(found: Sequence[ResultRow]) -> list[str]:
    """Return the names of the rows whose aim is missed."""
    return [row.name for row in found if row.against == "aim" and (row.ratio or 0.0) < 1.0]


async def run(seed: int, queue_ms: float | None) -> None:
    router = ["--ttft-slo-ms", f"{1e3 * GOAL.ttft_s:g}", "--tpot-slo-ms", f"{1e3 * GOAL.tpot_s:g}"]
    if queue_ms is not None:
        router += ["--admission-queue-ms", f"{queue_ms:g}"]
    core = leave_client_core()
    with tempfile.TemporaryDirectory(prefix="baton-overload-") as folder:
        pool = Standalone(Path(folder), worker_options=WORKER, router_options=router)
        try:
            await pool.start()
            print(take_client_core(core), flush=True)
            load = OverloadTraffic(pool.url, seed)
            await load.sustained(4.0)  # the router learns
            capacity = await load.sustained(8.0)
            print(f"sustained: {capacity:.1f} requests/s", flush=True)
            results = await sweep(load, capacity)
            normal_s, before_s, after_s = await recovery(load, capacity)
        finally:
            await pool.close()
    found = rows(capacity, results)
    found += [
        ResultRow("normal again after", normal_s, "s"),
        ResultRow("TTFT p50 at half the load before", 1e3 * before_s, "ms"),
        ResultRow(
            "TTFT p50 at half the load after", 1e3 * after_s, "ms", "before", before_s / after_s
        ),
    ]
    finish("overload", found)
    print(f"aims missed: {', '.join(missed_aims(found)) or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--queue-ms", type=float)
    options = parser.parse_args()
    asyncio.run(run(options.seed, options.queue_ms))


if __name__ == "__main__":
    main()
