"""What the interference benchmark draws and how it sums up."""

from __future__ import annotations

from math import inf

from bench.interference.step_budgets import budget_rows
from bench.interference.traffic import (
    UNSPLIT,
    InterferenceBenchmark,
    InterferencePlan,
    LatencySummary,
    PromptMix,
    Subject,
    arrivals,
    running_pool,
    summarize,
)
from bench.lib.http_load import Objective, StreamTiming
from cluster.models.locate import demo_path


def test_every_fourth_request_is_long() -> None:
    mix = PromptMix(short=5, long=50, output=3)
    load = arrivals(mix, rate=10.0, count=400, seed=1)
    assert [len(a.prompt) for a in load] == [5, 5, 5, 50] * 100
    assert 32.0 < load[-1].at < 48.0  # 400 at 10 per second, give or take four deviations
    assert arrivals(mix, rate=10.0, count=400, seed=1) == load


def test_only_what_meets_both_objectives_is_good() -> None:
    good = StreamTiming(0.0, 200, 1.0, 0.1, 0.01, (0.01,) * 98)
    slow = StreamTiming(0.0, 200, 1.0, 0.1, 0.03, (0.02, 0.5))
    late = StreamTiming(0.0, 200, 3.0, 2.0, 0.01)
    lost = StreamTiming(0.0, 0, 1.0)
    s = summarize([good, slow, late, lost], 2.0, Objective(ttft_s=1.0, tpot_s=0.02))
    assert (s.goodput, s.answered) == (0.5, 1.5)
    assert (s.itl_p50, s.itl_p99) == (0.01, 0.5)
    assert s.ttft_p99 == inf


async def test_a_pool_that_does_not_split_answers() -> None:
    subject = Subject("demo", demo_path(), PromptMix(16, 64, 4))
    bench = InterferenceBenchmark(subject, InterferencePlan((), (), (), 1, 8, 1))
    objective = Objective(10.0, 1.0)
    async with running_pool(bench.subject, UNSPLIT, objective, chunk=32) as pool:
        found = await bench.segment(pool.url, bench.load(20.0), objective)
    assert found.goodput == found.answered > 0


def test_own_budget_is_compared_with_the_best_fixed_one_in_each_figure() -> None:
    def summary(goodput: float, itl_p99: float) -> LatencySummary:
        return LatencySummary(goodput, goodput, 0.1, 0.2, 0.01, itl_p99, 0.01)

    found = [summary(4.0, 0.02), summary(2.0, 0.01), summary(5.0, 0.05)]
    rows = budget_rows("at", found)
    ratios = {row.name: row.ratio for row in rows if row.ratio is not None}
    assert ratios == {"at, own budget: goodput": 0.8, "at, own budget: ITL p99": 0.5}
