"""Chats with long prompts among them, the pools that serve them, and what their streams show."""

from __future__ import annotations

import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.lib.http_load import Arrival, ClosedLoop, LoadClient, Objective, StreamTiming
from bench.lib.report import percentile
from bench.lib.standalone import Standalone

SPLIT, UNSPLIT = ("prefill", "decode"), ("decode", "decode")
STREAMS = 16
SLACK = 4.0
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

    chunks: Sequence[int | None]  # None: steps are bounded by time
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
    subject: Subject,
    roles: Sequence[str],
    objective: Objective | None,
    *,
    chunk: int | None = None,
    budget_ms: float | None = None,
) -> AsyncIterator[Standalone]:
    """Run workers of one thread each and a router, all of which know the objectives. Steps are as
    the product bounds them, or have a fixed ``chunk`` and no budget, or a fixed budget."""
    model = ("--model", str(subject.path), "--model-id", MODEL)
    worker = ["--kv-tokens", "49152", "--max-model-len", "4096", *model]
    if chunk is not None:
        worker += ["--prefill-chunk", str(chunk), "--step-budget-ms", "0"]
    if budget_ms is not None:
        worker += ["--step-budget-ms", f"{budget_ms:g}"]
    goals: tuple[str, ...] = ()
    if objective is not None:
        goals = ("--ttft-slo-ms", f"{1e3 * objective.ttft_s:g}")
        goals += ("--tpot-slo-ms", f"{1e3 * objective.tpot_s:g}")
    router = (*model, "--admission-ttft-ms", "600000", *goals)  # no request is refused here
    with tempfile.TemporaryDirectory(prefix="baton-mix-") as folder:
        pool = Standalone(Path(folder), roles, (*worker, *goals), router)
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

    def with_mix(self, mix: PromptMix) -> InterferenceBenchmark:
        """Return the benchmark of the same model with other traffic."""
        return InterferenceBenchmark(self.subject._replace(mix=mix), self.plan)

    def load(
        self, rate: float, mix: PromptMix | None = None, count: int | None = None
    ) -> list[Arrival]:
        self._seed += 1
        return arrivals(mix or self.subject.mix, rate, count or self.plan.requests, self._seed)

    async def warm(self, url: str) -> None:
        """Send some requests, from which the router learns how fast the workers are."""
        found = await self.closed_loop(url, STREAMS, STREAMS // 2)
        assert all(a.status == 200 for a in found.answers), "a warm-up request failed"

    async def capacity(self, url: str) -> float:
        """Return the requests per second that are answered with 16 under way."""
        found = await self.closed_loop(url, self.plan.requests, STREAMS)
        return len(found.answers) / found.seconds

    async def objective(self, url: str) -> Objective:
        """Return multiples of the latencies that a request has on idle workers."""
        mix = self.subject.mix
        answers = (await self.closed_loop(url, 12, 1)).answers
        long = answers[mix.every - 1 :: mix.every]
        short = [a for i, a in enumerate(answers) if i % mix.every != mix.every - 1]
        ttft_s, tpot_s = median(a.ttft_s for a in long), median(a.tpot_s for a in short)
        return Objective(SLACK * ttft_s, SLACK * tpot_s)

    async def segment(
        self, url: str, load: Sequence[Arrival], objective: Objective
    ) -> LatencySummary:
        answers = await self.client(url).open_loop(load)
        seconds = max(a.at + a.ended_s for a in answers)
        return summarize(answers, max(load[-1].at, 0.5 * seconds), objective)

    async def closed_loop(self, url: str, count: int, streams: int) -> ClosedLoop:
        return await self.client(url).closed_loop(self.load(1.0, count=count), streams)

    @staticmethod
    def client(url: str) -> LoadClient:
        return LoadClient(url, MODEL, timeout_s=TIMEOUT_S)


def print_progress(at: str, s: LatencySummary) -> None:
    print(
        f"{at}: goodput {s.goodput:.2f}/s, answered {s.answered:.2f}/s,"
        f" TTFT {1e3 * s.ttft_p50:.0f} / {1e3 * s.ttft_p99:.0f} ms,"
        f" ITL {1e3 * s.itl_p50:.1f} / {1e3 * s.itl_p99:.1f} ms,"
        f" TPOT p90 {1e3 * s.tpot_p90:.1f} ms",
        flush=True,
    )
