"""Split workers beside unsplit ones, whose best chunk size is searched first."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from bench.interference.traffic import (
    SPLIT,
    UNSPLIT,
    InterferenceBenchmark,
    LatencySummary,
    PromptMix,
    print_progress,
    running_pool,
)
from bench.lib.http_load import Arrival, Objective
from bench.lib.report import ResultRow

CHUNKS = (64, 128, 256, 512)
BY_TIME = None
"""Stands for a chunk size: steps with decoding are bounded by time, as the product does."""

SWEEP_LOAD = 0.7


class ChosenChunk(NamedTuple):
    """The best chunk of the unsplit workers, and the capacity and objectives measured with them."""

    chunk: int | None
    capacity: float
    objective: Objective
    rows: list[ResultRow]


async def choose_chunk(bench: InterferenceBenchmark) -> ChosenChunk:
    """Sweep the chunk size; capacity and objectives are measured with the first size."""
    capacity, objective = 0.0, None
    found: dict[int | None, LatencySummary] = {}
    load: list[Arrival] = []
    label = bench.subject.label
    for chunk in bench.plan.chunks:
        async with running_pool(bench.subject, UNSPLIT, objective, chunk=chunk) as pool:
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


def chunk_name(chunk: int | None) -> str:
    return "steps bounded by time" if chunk is BY_TIME else f"chunks of {chunk}"


async def compare(bench: InterferenceBenchmark, chosen: ChosenChunk) -> list[ResultRow]:
    """Measure both pools in turns at each load, then at each length of the long prompts."""
    label, objective = bench.subject.label, chosen.objective
    async with (
        running_pool(bench.subject, SPLIT, objective) as split,
        running_pool(bench.subject, UNSPLIT, objective, chunk=chosen.chunk) as unsplit,
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
