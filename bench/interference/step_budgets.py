"""The step budget that a decode worker finds by itself, beside fixed ones."""

from __future__ import annotations

from contextlib import AsyncExitStack
from statistics import median

from bench.interference.traffic import (
    SPLIT,
    InterferenceBenchmark,
    LatencySummary,
    print_progress,
    running_pool,
    summarize,
)
from bench.lib.http_load import Objective
from bench.lib.report import ResultRow

BUDGETS_MS = (None, 10.0, 15.0, 25.0, 50.0)
"""None: the worker's own."""

SHORT = 256
CLOSED_STREAMS = 12
CLOSED = 0.0
"""Stands for a load: so many streams are under way all the time."""

LOADS = (CLOSED, 0.5, 0.8)
"""Shares of what the closed loop sustains."""


async def compare_budgets(bench: InterferenceBenchmark) -> list[ResultRow]:
    """Measure one prefill and one decode worker under each budget, in turns, at each load."""
    bench = bench.with_mix(bench.subject.mix._replace(short=SHORT))
    async with running_pool(bench.subject, SPLIT, None) as idle:
        await bench.warm(idle.url)
        objective = await bench.objective(idle.url)
    label, rows = f"{bench.subject.label}, budgets", []
    rows.append(ResultRow(f"{label}, TTFT objective", 1e3 * objective.ttft_s, "ms"))
    rows.append(ResultRow(f"{label}, TPOT objective", 1e3 * objective.tpot_s, "ms"))
    async with AsyncExitStack() as stack:
        urls = []
        for budget in BUDGETS_MS:
            running = running_pool(bench.subject, SPLIT, objective, budget_ms=budget)
            pool = await stack.enter_async_context(running)
            await bench.warm(pool.url)
            urls.append(pool.url)
        capacity = 0.0
        for load in LOADS:
            found = await _in_turns(bench, urls, objective, load * capacity)
            if load == CLOSED:
                capacity = found[0].answered
            name = f"{CLOSED_STREAMS} streams" if load == CLOSED else f"{load:.0%}"
            rows += budget_rows(f"{label}, {name}", found)
    return rows


async def _in_turns(
    bench: InterferenceBenchmark, urls: list[str], objective: Objective, rate: float
) -> list[LatencySummary]:
    """Return the medians over the rounds for each URL. ``rate`` 0: a closed loop."""
    rounds: list[list[LatencySummary]] = [[] for _ in urls]
    for turn in range(max(bench.plan.rounds, len(urls) if bench.plan.rounds > 1 else 1)):
        load = bench.load(rate or 1.0)
        for place in range(len(urls)):
            which = (place + turn) % len(urls)  # each is first, second and so on equally often
            if rate:
                found = await bench.segment(urls[which], load, objective)
            else:
                closed = await bench.client(urls[which]).closed_loop(load, CLOSED_STREAMS)
                found = summarize(closed.answers, closed.seconds, objective)
            rounds[which].append(found)
            print_progress(f"{budget_name(which)} at {rate:.2f}/s", found)
    return [LatencySummary(*map(median, zip(*of, strict=True))) for of in rounds]


def budget_rows(at: str, found: list[LatencySummary]) -> list[ResultRow]:
    """Return the rows of one load. Ratios compare the worker's own budget with the best fixed one
    in each figure and are larger where its own is better."""
    own, fixed = found[0], found[1:]
    most, least = max(f.goodput for f in fixed), min(f.itl_p99 for f in fixed)
    rows = []
    for which, summary in enumerate(found):
        name, best = f"{at}, {budget_name(which)}", "" if which else "best fixed"
        goodput = own.goodput / most if best and most else None
        itl = least / own.itl_p99 if best else None
        rows.append(ResultRow(f"{name}: goodput", summary.goodput, "/s", best, goodput))
        rows.append(ResultRow(f"{name}: ITL p99", 1e3 * summary.itl_p99, "ms", best, itl))
        rows.append(ResultRow(f"{name}: TTFT p50", 1e3 * summary.ttft_p50, "ms"))
    return rows


def budget_name(which: int) -> str:
    budget = BUDGETS_MS[which]
    return "own budget" if budget is None else f"{budget:g} ms"
