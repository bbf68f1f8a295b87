"""Pools of some 64 GPUs in the simulator: an autoscaler, the best fixed split, and an oracle.

    python -m bench.pools [--study azure|day|mooncake] [--traces FOLDER] [--gpus 64] [--quick]
    python -m bench.pools --trace FILE [--copies 10] [--ttft-ms 4000]
    python -m bench.pools ... --splits 45+11,46+10

Each study plays one workload at a rate that needs about ``--gpus`` at its peak, or copies of any
other trace:

    autoscaled   Baton's own policy (cluster/sizing), from the pools that its formulas want for the
                 first five minutes; its attainment of both objectives is the mark for the others
    fixed        the smallest number of workers of which some split P + D attains as much
    oracle       for every five minutes, the smallest such number for these five minutes alone;
                 the future is known and starts take no time. What no number of workers meets may
                 miss, and of the other misses each five minutes have their part

GPU-hours are counted from asking for a worker until it is gone, and for all three end with the last
arrival. Routers refuse what would be late while an overload lasts: a refused request has missed its
objectives. Searches end a simulation as soon as too many requests have missed theirs. A worker is
an H200 that serves Llama-3-70B with fp8 weights and bf16 arithmetic; its coefficients are
constants, so that the figures of two versions of Baton can be compared.

``--splits`` tries these fixed splits, the smallest first, in place of the search, which takes hours
where a simulation takes minutes.

``--quick`` plays a part of each workload on fewer GPUs: about 5 minutes of one core, and 5 more for
the oracle.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.lib.report import ResultRow, finish
from bench.simulator.split_search import PoolSplit, SplitTrial, least, oracle, parse_splits
from bench.simulator.studies import STUDIES, Study, of_trace, quick_study
from cluster.simulator.result import SimulationResult
from cluster.simulator.scenario import Scenario, parse_scenario
from cluster.simulator.simulation import simulate
from cluster.sizing.decision import DecisionRecord
from cluster.sizing.demand import demand_by_role
from cluster.sizing.snapshot import NO_CORRECTIONS, RequestMix, RequestSample
from cluster.workloads.traces import cached_tokens

WINDOW_S = 300.0
START_S = 60.0
"""A cold start: the default of `autoscaler.start_s`."""


def scaled(study: Study, begin: PoolSplit, most: int, tuning: dict[str, Any]) -> Scenario:
    return parse_scenario(
        {
            **study.scenario,
            "name": study.name,
            "pools": {"prefill": begin.prefill, "decode": begin.decode},
            "autoscaler": {
                "mode": "act",
                "prefill_max": most,
                "decode_max": most,
                "start_s": START_S,
                **tuning,
            },
        }
    )


def needed(trial: SplitTrial, begin: float, end: float, start_s: float = math.inf) -> PoolSplit:
    """Compute the pools that the policy's formulas want for these requests, if other prefill
    workers can serve after ``start_s``. Prefixes that they share are cached. Decode workers are
    those of a load that lasts: nothing decodes yet, so that the policy would want few at first."""
    jobs = trial.between(begin, end)
    cached = cached_tokens((job.prompt - 1, job.blocks) for job in jobs)
    mix = RequestMix(
        rate=len(jobs) / (end - begin),
        window_s=end - begin,
        samples=tuple(
            RequestSample(float(job.prompt - hit), float(hit), float(job.output))
            for job, hit in zip(jobs, cached, strict=True)
        ),
    )
    soon, lasting = (
        demand_by_role(mix, trial.machines, trial.scenario.goals, NO_CORRECTIONS, seconds)
        for seconds in (start_s, math.inf)
    )
    return PoolSplit(soon["prefill"].workers, lasting["decode"].workers)


class StudyOutcome(NamedTuple):
    """The autoscaled run, the best fixed split and the oracle of one study."""

    result: SimulationResult
    fixed: PoolSplit | None  # None: no split that was tried attains as much
    fixed_hours: float
    fixed_refused: int
    oracle_hours: float
    seconds: float


def run(
    study: Study, tuning: dict[str, Any], splits: Sequence[PoolSplit], *, known: bool
) -> StudyOutcome:
    """Run one study; ``known`` includes the oracle, which knows the future. ``splits``: to try in
    place of the search, if there are any."""
    began = time.perf_counter()
    trial = SplitTrial(parse_scenario({**study.scenario, "name": study.name}))
    begin = needed(trial, 0.0, WINDOW_S, START_S)
    print_progress(f"{study.name}: begins with {begin}")
    simulated = simulate(scaled(study, begin, 1000, tuning), keep_records=True)
    of = simulated.result
    print_progress(describe_run(of, simulated.records))
    hours = of.seconds / 3600
    trial.share = of.both_met
    windows = [needed(trial, at, at + WINDOW_S) for at in starts(trial.ends)]
    guess = PoolSplit(max(w.prefill for w in windows), max(w.decode for w in windows))
    fixed = first_of(trial, splits) if splits else least(trial.attains, guess, print_progress)
    refused = 0
    if fixed is not None:
        pools = {"prefill": fixed.prefill, "decode": fixed.decode}
        whole = parse_scenario({**study.scenario, "name": study.name, "pools": pools})
        refused = simulate(whole).result.refused
        print_progress(f"fixed: {fixed}, {fixed.total * hours:.1f} GPU-hours, refused {refused}")
    best = oracle(trial, windows, WINDOW_S, print_progress) if known else math.nan
    fixed_hours = math.nan if fixed is None else fixed.total * hours
    return StudyOutcome(of, fixed, fixed_hours, refused, best, time.perf_counter() - began)


def first_of(trial: SplitTrial, splits: Sequence[PoolSplit]) -> PoolSplit | None:
    """Return the smallest of the splits that attains the trial's share."""
    for split in sorted(splits, key=lambda split: split.total):
        attained = trial.attains(split)
        print_progress(f"  {split}: {'yes' if attained else 'no'}")
        if attained:
            return split
    return None


def starts(ends: float) -> list[float]:
    """Return the beginnings of all windows; a short rest belongs to the last one."""
    return [i * WINDOW_S for i in range(max(1, math.floor(ends / WINDOW_S)))]


def describe_run(of: SimulationResult, records: list[DecisionRecord]) -> str:
    most = max(r.decision.wanted.total for r in records)
    return (
        f"autoscaled: {of.requests} requests, both {of.both_met:.3%} (TTFT {of.ttft_met:.2%}, TPOT"
        f" {of.tpot_met:.2%}), refused {of.refused}, {of.gpu_hours:.1f} GPU-hours, at most {most}"
        f" wanted, {of.loans} loans, {of.reasons}, {of.wall_s:.0f} s"
    )


def print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def rows(study: Study, of: StudyOutcome) -> list[ResultRow]:
    used = of.result.gpu_hours
    refused, fixed_refused = (n / of.result.requests for n in (of.result.refused, of.fixed_refused))
    found = [
        ResultRow(f"{study.name}: attainment", of.result.both_met, "share"),
        ResultRow(f"{study.name}: refused by autoscaled pools", refused, "share"),
        ResultRow(f"{study.name}: autoscaled", used, "GPU-hours"),
    ]
    if of.fixed is not None:
        ratio = of.fixed_hours / used
        found += [
            ResultRow(f"{study.name}: refused by the fixed split", fixed_refused, "share"),
            ResultRow(
                f"{study.name}: fixed {of.fixed}", of.fixed_hours, "GPU-hours", "autoscaled", ratio
            ),
        ]
    if not math.isnan(of.oracle_hours):
        ratio = of.oracle_hours / used
        found.append(
            ResultRow(f"{study.name}: oracle", of.oracle_hours, "GPU-hours", "autoscaled", ratio)
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", choices=[*STUDIES, "all"], default="all")
    parser.add_argument("--traces", type=Path, default=Path("traces"))
    parser.add_argument("--gpus", type=float, default=64.0)
    parser.add_argument("--trace", type=Path, help="another trace, in place of the studies")
    parser.add_argument("--copies", type=float, default=1.0, help="of it, with --trace")
    parser.add_argument("--ttft-ms", type=float, default=4000.0, help="objective, with --trace")
    parser.add_argument("--quick", action="store_true", help="small")
    parser.add_argument("--no-oracle", action="store_true", help="which takes longest")
    parser.add_argument("--splits", type=parse_splits, default=[], help="P+D,P+D,...")
    parser.add_argument("--tuning", default="{}", help="JSON: keys of the section autoscaler")
    args = parser.parse_args()
    names = list(STUDIES) if args.study == "all" else [args.study]
    found = []
    if args.trace is not None:
        studies = [of_trace(args.trace.stem, args.trace, args.copies, args.ttft_ms)]
    elif args.quick:
        studies = [quick_study(name, args.traces) for name in names]
    else:
        studies = [STUDIES[name](args.traces, args.gpus) for name in names]
    for study in studies:
        tuning = msgspec.json.decode(args.tuning)
        outcome = run(study, tuning, args.splits, known=not args.no_oracle)
        print_progress(f"{study.name}: {outcome.seconds:.0f} s")
        found += rows(study, outcome)
    finish("pools", found)


if __name__ == "__main__":
    main()
