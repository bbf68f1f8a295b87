"""The figures of a contest as rows."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.autoscale_contest import Run
from bench.autoscale_figures import Figures, acts_after, figures, good_after
from bench.autoscale_phases import Phase, Span, spans
from bench.open_loop import Objective
from bench.report import Row, percentile


def whole(phases: Sequence[Phase]) -> Span:
    return Span("all", 0.0, sum(phase.seconds for phase in phases))


def rows(
    baton: Run, ray: Sequence[Run], fixed: Sequence[Run], phases: Sequence[Phase], goal: Objective
) -> list[Row]:
    runs = [baton, *ray, *fixed]
    of = [figures(run.answers, run.looks, whole(phases), goal) for run in runs]
    found: list[Row] = []
    for run, each in zip(runs, of, strict=True):
        found += _contestant(run, each)
    rivals = {"Ray Serve": of[1 : 1 + len(ray)], "fixed split": of[1 + len(ray) :]}
    for kind, those in rivals.items():
        if those:
            best = max(each.per_worker_second for each in those)
            value = of[0].per_worker_second
            ratio = value / best if best else None
            found.append(Row("goodput per worker-second", value, "requests", f"best {kind}", ratio))
    found += _reaction(runs[: 1 + len(ray)], phases, goal)
    found += _moves(baton)
    return found


def _contestant(run: Run, of: Figures) -> list[Row]:
    name = run.contestant.name
    return [
        Row(f"{name}: both objectives", of.both, "of requests"),
        Row(f"{name}: TTFT", of.ttft, "of requests"),
        Row(f"{name}: TPOT", of.tpot, "of requests"),
        Row(f"{name}: failed", of.failed, "of requests"),
        Row(f"{name}: refused", of.refused, "of requests"),
        Row(f"{name}: workers, mean", of.mean_workers, ""),
        Row(f"{name}: goodput per worker-second", of.per_worker_second, "requests"),
        Row(f"{name}: steps late", run.late.late_share, "of steps"),
        Row(f"{name}: steps longer than declared", run.late.excess_share, "of their time"),
    ]


def _reaction(runs: Sequence[Run], phases: Sequence[Phase], goal: Objective) -> list[Row]:
    found = []
    for run in runs:
        for number, span in enumerate(spans(phases)):
            if not number and len(phases) > 2:
                continue  # nothing has changed yet
            name = f"{run.contestant.name}: {span.name} ({number + 1})"
            of = figures(run.answers, run.looks, span, goal)
            found.append(Row(f"{name}: both objectives", of.both, "of requests"))
            found.append(Row(f"{name}: workers, mean", of.mean_workers, ""))
            if (acted := acts_after(run.looks, span)) is not None:
                found.append(Row(f"{name}: roles change after", acted, "s"))
            good = good_after(run.answers, span, goal)
            if good is not None:
                found.append(Row(f"{name}: in time for good after", good, "s"))
    return found


def _moves(run: Run) -> list[Row]:
    loans, starts = run.took
    found = []
    if loans:
        found += [
            Row(f"loans ({len(loans)}), median", median(loans), "s"),
            Row("loans, slowest", percentile(loans, 1.0), "s"),
        ]
    if starts:
        found.append(Row(f"cold starts ({len(starts)}), median", median(starts), "s"))
    if loans and starts:
        ratio = median(starts) / median(loans)
        found[0] = Row(found[0].name, median(loans), "s", "a cold start", ratio)
    return found
