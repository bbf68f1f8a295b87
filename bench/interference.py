"""Do long prompts disturb short chats? One prefill and one decode worker against two unsplit ones.

    python -m bench.interference [--quick] [--model demo|100M] [--seed N]

Chats of 128 tokens, every fourth request a prompt of 1,500, each with an answer of 64, arriving as
a Poisson process. "split": one prefill and one decode worker, as the product routes by default.
"unsplit": two workers that do both, with chunked prefill; the size of their chunks is swept first,
at 70% of what they sustain in a closed loop, and the best one (by goodput, then by ITL p99) is
taken. Both stand on the same machine, and serve the same requests in turn.

Objectives, the same for both: four times the TTFT of a long prompt, and four times the TPOT of a
short chat, on idle unsplit workers. Goodput: requests per second of the load's own duration that
meet both. ITL: gaps between chunks of a stream.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.mixed_load import Due, Figures, Goal, Mix, arrivals, closed_loop, figures, open_loop
from bench.random_model import SHAPE_100M, make
from bench.report import Row, finish
from bench.standalone import Standalone
from cluster.models import demo_path

CHUNKS = (64, 128, 256, 512)
OWN = 0
"""In place of a chunk: steps with decoding are bounded by time, to half the TPOT objective."""

SPLIT, UNSPLIT = ("prefill", "decode"), ("decode", "decode")
STREAMS = 16
SLACK = 4.0
SWEEP_LOAD = 0.7
MODEL = "measured"


class Plan(NamedTuple):
    """How much to measure. ``requests``: in one segment."""

    chunks: Sequence[int]
    loads: Sequence[float]
    lengths: Sequence[int]  # of the long prompts, for the second sweep
    rounds: int
    requests: int
    seed: int


class Subject(NamedTuple):
    """What is measured."""

    label: str
    path: Path
    mix: Mix


@asynccontextmanager
async def pool(
    subject: Subject, roles: Sequence[str], chunk: int, goal: Goal | None
) -> AsyncIterator[Standalone]:
    """Workers of one thread each, and a router that knows the objectives."""
    model = ("--model", str(subject.path), "--model-id", MODEL)
    size = ("--kv-tokens", "49152", "--max-model-len", "4096", *model)
    steps: tuple[str, ...] = ("--prefill-chunk", str(chunk), "--step-budget-ms", "0")
    if chunk == OWN:
        steps = () if goal is None else ("--step-budget-ms", f"{500 * goal.tpot:g}")
    slo: tuple[str, ...] = ("--admission-ttft-ms", "600000")  # nobody is refused here
    if goal is not None:
        slo += ("--ttft-slo-ms", f"{1e3 * goal.ttft:g}", "--tpot-slo-ms", f"{1e3 * goal.tpot:g}")
    with tempfile.TemporaryDirectory(prefix="baton-mix-") as folder:
        running = Standalone(Path(folder), roles, (*size, *steps), (*model, *slo))
        try:
            await running.start()
            yield running
        finally:
            await running.close()


class Bench:
    """Draws loads, each other than the last, and sends them."""

    def __init__(self, subject: Subject, plan: Plan) -> None:
        self.subject = subject
        self.plan = plan
        self.model = MODEL
        self._seed = plan.seed

    def load(self, rate: float, mix: Mix | None = None, count: int | None = None) -> list[Due]:
        self._seed += 1
        count = count or self.plan.requests
        return arrivals(mix or self.subject.mix, rate, count, self._seed, self.model)

    async def warm(self, url: str) -> None:
        """The router learns how fast the workers are."""
        seen, _ = await closed_loop(url, self.load(1.0, count=STREAMS), STREAMS // 2)
        assert all(s.ok for s in seen), "a warm-up request failed"

    async def capacity(self, url: str) -> float:
        """Requests per second with 16 under way."""
        load = self.load(1.0)
        _, seconds = await closed_loop(url, load, STREAMS)
        return len(load) / seconds

    async def idle(self, url: str) -> Goal:
        """The objectives: multiples of what a request takes alone."""
        seen, _ = await closed_loop(url, self.load(1.0, count=12), 1)
        ttft = median(s.ttft for s in seen if s.long)
        return Goal(SLACK * ttft, SLACK * median(s.tpot for s in seen if not s.long))

    async def segment(self, url: str, load: Sequence[Due], goal: Goal) -> Figures:
        seen, seconds = await open_loop(url, load)
        return figures(seen, max(load[-1].at, 0.5 * seconds), goal)


class Chosen(NamedTuple):
    chunk: int
    capacity: float
    goal: Goal
    rows: list[Row]


async def choose_chunk(bench: Bench) -> Chosen:
    """The unsplit workers' best chunk; capacity and objectives are those of the first one tried."""
    capacity, goal = 0.0, None
    found: dict[int, Figures] = {}
    load: list[Due] = []
    for chunk in bench.plan.chunks:
        async with pool(bench.subject, UNSPLIT, chunk, goal) as running:
            await bench.warm(running.url)
            if goal is None:
                goal = await bench.idle(running.url)
                capacity = await bench.capacity(running.url)
                load = bench.load(SWEEP_LOAD * capacity)
            found[chunk] = await bench.segment(running.url, load, goal)
            say(f"{bench.subject.label}, unsplit, {name(chunk)}", found[chunk])
    assert goal is not None
    best = max(found, key=lambda c: (round(found[c].goodput / capacity, 1), -found[c].itl_p99))
    rows = [
        Row(f"{bench.subject.label}, sustained unsplit", capacity, "requests/s"),
        Row(f"{bench.subject.label}, TTFT objective", 1e3 * goal.ttft, "ms"),
        Row(f"{bench.subject.label}, TPOT objective", 1e3 * goal.tpot, "ms"),
        Row(f"{bench.subject.label}, best chunk ({name(best)})", found[best].goodput, "good/s"),
    ]
    return Chosen(best, capacity, goal, rows)


def name(chunk: int) -> str:
    return "steps bounded by time" if chunk == OWN else f"chunks of {chunk}"


async def compare(bench: Bench, chosen: Chosen) -> list[Row]:
    """Both, in turn, at each load, then at each length of the long prompts."""
    label = bench.subject.label
    async with (
        pool(bench.subject, SPLIT, OWN, chosen.goal) as split,
        pool(bench.subject, UNSPLIT, chosen.chunk, chosen.goal) as unsplit,
    ):
        urls = (split.url, unsplit.url)
        for url in urls:
            await bench.warm(url)
        rows = []
        for share in bench.plan.loads:
            rate = share * chosen.capacity
            rows += await _paired(bench, f"{label}, {share:.0%}", urls, chosen.goal, rate, None)
        for long in bench.plan.lengths:
            mix = bench.subject.mix._replace(long=long)
            # The same tokens per second as with the usual prompts, as far as prompts go.
            usual = bench.subject.mix.long + 3 * bench.subject.mix.short
            rate = SWEEP_LOAD * chosen.capacity * usual / (long + 3 * mix.short)
            rate = min(rate, chosen.capacity)
            rows += await _paired(bench, f"{label}, long {long}", urls, chosen.goal, rate, mix)
    return rows


async def _paired(
    bench: Bench, at: str, urls: tuple[str, str], goal: Goal, rate: float, mix: Mix | None
) -> list[Row]:
    pairs: list[list[Figures]] = [[], []]
    for turn in range(bench.plan.rounds):
        load = bench.load(rate, mix)
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            got = await bench.segment(urls[which], load, goal)
            pairs[which].append(got)
            say(f"{at} ({rate:.2f}/s), {'unsplit' if which else 'split'}", got)
    split, unsplit = (Figures(*map(median, zip(*side, strict=True))) for side in pairs)
    rows = []
    for side, of in (("split", split), ("unsplit", unsplit)):
        other = unsplit if side == "split" else None
        rows += _rows(f"{at}, {side}", of, other)
    return rows


def _rows(at: str, of: Figures, other: Figures | None) -> list[Row]:
    than = "unsplit" if other else ""

    def ratio(ours: float, theirs: float | None) -> float | None:
        """Larger is better."""
        return theirs / ours if theirs is not None and ours else None

    return [
        Row(
            f"{at}: goodput",
            of.goodput,
            "/s",
            than,
            ratio(other.goodput, of.goodput) if other else None,
        ),
        Row(
            f"{at}: ITL p99",
            1e3 * of.itl_p99,
            "ms",
            than,
            ratio(of.itl_p99, other and other.itl_p99),
        ),
        Row(
            f"{at}: ITL p50",
            1e3 * of.itl_p50,
            "ms",
            than,
            ratio(of.itl_p50, other and other.itl_p50),
        ),
        Row(
            f"{at}: TTFT p50",
            1e3 * of.ttft_p50,
            "ms",
            than,
            ratio(of.ttft_p50, other and other.ttft_p50),
        ),
        Row(
            f"{at}: TTFT p99",
            1e3 * of.ttft_p99,
            "ms",
            than,
            ratio(of.ttft_p99, other and other.ttft_p99),
        ),
    ]


def say(at: str, f: Figures) -> None:
    print(
        f"{at}: goodput {f.goodput:.2f}/s, answered {f.answered:.2f}/s, TTFT {1e3 * f.ttft_p50:.0f}"
        f" / {1e3 * f.ttft_p99:.0f} (short {1e3 * f.short_ttft_p99:.0f}) ms, ITL"
        f" {1e3 * f.itl_p50:.1f} / {1e3 * f.itl_p99:.1f} ms, TPOT p90 {1e3 * f.tpot_p90:.1f} ms",
        flush=True,
    )


async def run(models: Sequence[str], plans: dict[str, Plan]) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="baton-mix-") as folder:
        for label in models:
            path = demo_path() if label == "demo" else make(Path(folder) / "r100m", SHAPE_100M)
            bench = Bench(Subject(label, path, Mix()), plans[label])
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
        plans = dict.fromkeys(("demo", "100M"), Plan((128, OWN), (0.5,), (), 1, 40, o.seed))
    else:
        plans = {
            "demo": Plan((*CHUNKS, OWN), (0.3, 0.6, 0.9), (512, 3000), 2, 60, o.seed),
            "100M": Plan((64, 256, OWN), (0.4, 0.8), (), 1, 30, o.seed),
        }
    finish("interference", asyncio.run(run(models, plans)))


if __name__ == "__main__":
    main()
