"""Long prompts beside short chats: one prefill and one decode worker against two unsplit workers.

    python -m bench.interference [--quick] [--model demo|100M] [--seed N]

Requests arrive as a Poisson process: chats of 128 tokens, and every fourth request a prompt of
1,500; each has 64 output tokens. The "split" pool has one prefill and one decode worker, routed as
the product does by default. The "unsplit" pool has two workers that do both, with chunked prefill:
the chunk size is swept first, at 70% of what the workers sustain in a closed loop, and the best one
(by goodput, then by ITL p99) is used. Both pools stand on one machine and serve the same requests
in turns.

Both have the same objectives: four times the TTFT of a long prompt and four times the TPOT of a
short chat on idle unsplit workers. Goodput is requests per second that meet both objectives, over
the load's own duration. ITL is the gap between two chunks of a stream.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.lib.engines import SHAPE_100M, make
from bench.lib.http_load import Arrival, ClosedLoop, LoadClient, Objective, StreamTiming
from bench.lib.report import ResultRow, finish, percentile
from bench.lib.standalone import Standalone
from cluster.models.locate import demo_path

CHUNKS = (64, 128, 256, 512)
BY_TIME = 0
"""Stands for a chunk size: steps with decoding are bounded by time, to half the TPOT objective."""

SPLIT, UNSPLIT = ("prefill", "decode"), ("decode", "decode")
STREAMS = 16
SLACK = 4.0
SWEEP_LOAD = 0.7
MODEL = "measured"
FIRST_ID, VOCAB = 3, 4096
TIMEOUT_S = 240.0


class PromptMix(NamedTuple):
    """Lengths in tokens; every ``every``-th request has a long prompt."""

    short: int = 128
    long: int = 1500
    output: int = 64
    every: int = 4


class InterferencePlan(NamedTuple):
    """How much to measure for one model; ``requests`` is the size of one segment."""

    chunks: Sequence[int]
    loads: Sequence[float]
    lengths: Sequence[int]  # of the long prompts, for the second sweep
    rounds: int
    requests: int
    seed: int


class Subject(NamedTuple):
    """The model that is measured, and its traffic."""

    label: str
    path: Path
    mix: PromptMix


class LatencySummary(NamedTuple):
    """Rates in requests per second and latencies in seconds; the TTFT of a failed request is
    infinite."""

    goodput: float
    answered: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    tpot_p90: float


def arrivals(mix: PromptMix, rate: float, count: int, seed: int) -> list[Arrival]:
    """Draw a Poisson process of ``rate`` per second; its random prompts share no prefix."""
    draw = random.Random(seed)
    at, found = 0.0, []
    for i in range(count):
        size = mix.long if i % mix.every == mix.every - 1 else mix.short
        prompt = [draw.randrange(FIRST_ID, VOCAB) for _ in range(size)]
        found.append(Arrival(at, prompt, mix.output))
        at += draw.expovariate(rate)
    return found


def summarize(
    answers: Sequence[StreamTiming], seconds: float, objective: Objective
) -> LatencySummary:
    gaps = [gap for a in answers for gap in a.gaps] or [inf]
    ttft = [a.ttft_s for a in answers]
    return LatencySummary(
        sum(a.meets(objective) for a in answers) / seconds,
        sum(a.status == 200 for a in answers) / seconds,
        percentile(ttft, 0.5),
        percentile(ttft, 0.99),
        percentile(gaps, 0.5),
        percentile(gaps, 0.99),
        percentile([a.tpot_s for a in answers], 0.9),
    )


@asynccontextmanager
async def running_pool(
    subject: Subject, roles: Sequence[str], chunk: int, objective: Objective | None
) -> AsyncIterator[Standalone]:
    """Run workers of one thread each, and a router that knows the objectives."""
    model = ("--model", str(subject.path), "--model-id", MODEL)
    size = ("--kv-tokens", "49152", "--max-model-len", "4096", *model)
    steps: tuple[str, ...] = ("--prefill-chunk", str(chunk), "--step-budget-ms", "0")
    if chunk == BY_TIME:
        steps = () if objective is None else ("--step-budget-ms", f"{500 * objective.tpot_s:g}")
    router: tuple[str, ...] = ("--admission-ttft-ms", "600000")  # no request is refused here
    if objective is not None:
        router += ("--ttft-slo-ms", f"{1e3 * objective.ttft_s:g}")
        router += ("--tpot-slo-ms", f"{1e3 * objective.tpot_s:g}")
    with tempfile.TemporaryDirectory(prefix="baton-mix-") as folder:
        pool = Standalone(Path(folder), roles, (*size, *steps), (*model, *router))
        try:
            await pool.start()
            yield pool
        finally:
            await pool.close()


class InterferenceBenchmark:
    """Draws loads, each different from the last, and sends them."""

    def __init__(self, subject: Subject, plan: InterferencePlan) -> None:
        self.subject = subject
        self.plan = plan
        self._seed = plan.seed

    def load(
        self, rate: float, mix: PromptMix | None = None, count: int | None = None
    ) -> list[Arrival]:
        self._seed += 1
        return arrivals(mix or self.subject.mix, rate, count or self.plan.requests, self._seed)

    async def warm(self, url: str) -> None:
        """Send some requests, from which the router learns how fast the workers are."""
        found = await self._closed_loop(url, STREAMS, STREAMS // 2)
        assert all(a.status == 200 for a in found.answers), "a warm-up request failed"

    async def capacity(self, url: str) -> float:
        """Return the requests per second that are answered with 16 under way."""
        found = await self._closed_loop(url, self.plan.requests, STREAMS)
        return len(found.answers) / found.seconds

    async def objective(self, url: str) -> Objective:
        """Return multiples of the latencies that a request has on idle workers."""
        mix = self.subject.mix
        answers = (await self._closed_loop(url, 12, 1)).answers
        long = answers[mix.every - 1 :: mix.every]
        short = [a for i, a in enumerate(answers) if i % mix.every != mix.every - 1]
        ttft_s, tpot_s = median(a.ttft_s for a in long), median(a.tpot_s for a in short)
        return Objective(SLACK * ttft_s, SLACK * tpot_s)

    async def segment(
        self, url: str, load: Sequence[Arrival], objective: Objective
    ) -> LatencySummary:
        answers = await self._client(url).open_loop(load)
        seconds = max(a.at + a.ended_s for a in answers)
        return summarize(answers, max(load[-1].at, 0.5 * seconds), objective)

    async def _closed_loop(self, url: str, count: int, streams: int) -> ClosedLoop:
        return await self._client(url).closed_loop(self.load(1.0, count=count), streams)

    @staticmethod
    def _client(url: str) -> LoadClient:
        return LoadClient(url, MODEL, timeout_s=TIMEOUT_S)


class ChosenChunk(NamedTuple):
    """The best chunk of the unsplit workers, and the capacity and objectives measured with them."""

    chunk: int
    capacity: float
    objective: Objective
    rows: list[ResultRow]


async def choose_chunk(bench: InterferenceBenchmark) -> ChosenChunk:
    """Sweep the chunk size; capacity and objectives are measured with the first size."""
    capacity, objective = 0.0, None
    found: dict[int, LatencySummary] = {}
    load: list[Arrival] = []
    label = bench.subject.label
    for chunk in bench.plan.chunks:
        async with running_pool(bench.subject, UNSPLIT, chunk, objective) as pool:
            await bench.warm(pool.url)
            if objective is None:
                objective = await bench.objective(pool.url)
                capacity = await bench.capacity(pool.url)
                load = bench.load(SWEEP_LOAD * capacity)
            found[chunk] = await bench.segment(pool.url, load, objective)
            print_progress(f"{label}, unsplit, {chunk_name(chunk)}", found[chunk])
    assert objective is not None
    best = max(found, key=lambda c: (round(found[c].goodput / capacity, 1), -found[c].itl_p99))
    rows = [
        ResultRow(f"{label}, sustained unsplit", capacity, "requests/s"),
        ResultRow(f"{label}, TTFT objective", 1e3 * objective.ttft_s, "ms"),
        ResultRow(f"{label}, TPOT objective", 1e3 * objective.tpot_s, "ms"),
        ResultRow(f"{label}, best chunk ({chunk_name(best)})", found[best].goodput, "good/s"),
    ]
    return ChosenChunk(best, capacity, objective, rows)


def chunk_name(chunk: int) -> str:
    return "steps bounded by time" if chunk == BY_TIME else f"chunks of {chunk}"


async def compare(bench: InterferenceBenchmark, chosen: ChosenChunk) -> list[ResultRow]:
    """Measure both pools in turns at each load, then at each length of the long prompts."""
    label, objective = bench.subject.label, chosen.objective
    async with (
        running_pool(bench.subject, SPLIT, BY_TIME, objective) as split,
        running_pool(bench.subject, UNSPLIT, chosen.chunk, objective) as unsplit,
    ):
        urls = (split.url, unsplit.url)
        for url in urls:
            await bench.warm(url)
        rows = []
        for share in bench.plan.loads:
            rate = share * chosen.capacity
            rows += await _paired(bench, f"{label}, {share:.0%}", urls, objective, rate, None)
        for long in bench.plan.lengths:
            mix = bench.subject.mix._replace(long=long)
            # The same prompt tokens per second as with the usual prompts.
            usual = bench.subject.mix.long + 3 * bench.subject.mix.short
            rate = SWEEP_LOAD * chosen.capacity * usual / (long + 3 * mix.short)
            rate = min(rate, chosen.capacity)
            rows += await _paired(bench, f"{label}, long {long}", urls, objective, rate, mix)
    return rows


async def _paired(
    bench: InterferenceBenchmark,
    at: str,
    urls: tuple[str, str],
    objective: Objective,
    rate: float,
    mix: PromptMix | None,
) -> list[ResultRow]:
    pairs: list[list[LatencySummary]] = [[], []]
    for turn in range(bench.plan.rounds):
        load = bench.load(rate, mix)
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            got = await bench.segment(urls[which], load, objective)
            pairs[which].append(got)
            print_progress(f"{at} ({rate:.2f}/s), {'unsplit' if which else 'split'}", got)
    split, unsplit = (LatencySummary(*map(median, zip(*side, strict=True))) for side in pairs)
    return [*_rows(f"{at}, split", split, unsplit), *_rows(f"{at}, unsplit", unsplit, None)]


def _rows(at: str, of: LatencySummary, other: LatencySummary | None) -> list[ResultRow]:
    """Return one row per figure; ratios against ``other`` are larger where ``of`` is better."""
    against = "unsplit" if other else ""
    ratio = other.goodput and of.goodput / other.goodput if other else None
    rows = [ResultRow(f"{at}: goodput", of.goodput, "/s", against, ratio)]
    for name in ("itl_p99", "itl_p50", "ttft_p50", "ttft_p99"):
        value = getattr(of, name)
        ratio = getattr(other, name) / value if other and value else None
        label = name.replace("_", " ").replace("itl", "ITL").replace("ttft", "TTFT")
        rows.append(ResultRow(f"{at}: {label}", 1e3 * value, "ms", against, ratio))
    return rows


def print_progress(at: str, s: LatencySummary) -> None:
    print(
        f"{at}: goodput {s.goodput:.2f}/s, answered {s.answered:.2f}/s,"
        f" TTFT {1e3 * s.ttft_p50:.0f} / {1e3 * s.ttft_p99:.0f} ms,"
        f" ITL {1e3 * s.itl_p50:.1f} / {1e3 * s.itl_p99:.1f} ms,"
        f" TPOT p90 {1e3 * s.tpot_p90:.1f} ms",
        flush=True,
    )


async def run(models: Sequence[str], plans: dict[str, InterferencePlan]) -> list[ResultRow]:
    rows: list[ResultRow] = []
    with tempfile.TemporaryDirectory(prefix="baton-mix-") as folder:
        for label in models:
            path = demo_path() if label == "demo" else make(Path(folder) / "r100m", SHAPE_100M)
            bench = InterferenceBenchmark(Subject(label, path, PromptMix()), plans[label])
            chosen = await choose_chunk(bench)
            rows += chosen.rows + await compare(bench, chosen)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, demo model only")
    parser.add_argument("--model", choices=("demo", "100M"), action="append")
    parser.add_argument("--seed", type=int, default=1)
    o = parser.parse_args()
    models = o.model or (["demo"] if o.quick else ["demo", "100M"])
    if o.quick:
        quick = InterferencePlan((128, BY_TIME), (0.5,), (), 1, 40, o.seed)
        plans = dict.fromkeys(("demo", "100M"), quick)
    else:
        plans = {
            "demo": InterferencePlan(
                (*CHUNKS, BY_TIME), (0.3, 0.6, 0.9), (512, 3000), 2, 60, o.seed
            ),
            "100M": InterferencePlan((64, 256, BY_TIME), (0.4, 0.8), (), 1, 30, o.seed),
        }
    finish("interference", asyncio.run(run(models, plans)))


if __name__ == "__main__":
    main()
