"""Routing policies on Mooncake's conversation trace: two prefill and two decode workers.

    python -m bench.routing_policies --trace conversation_trace.jsonl [--quick] [--seed N]

The trace is published by kvcache-ai/Mooncake under ``FAST25-release/traces``; ``bench/mooncake.py``
says how it is scaled. One router for each policy stands before the same workers. What the machine
sustains is measured in a closed loop (mean of the policies); then requests come at their times in
the trace, at 50% and 90% of that. In a segment each policy in turn serves the same requests, its
cache empty of them (a salt of its own); the first quarter of the time warms it and is not counted.
Figures are medians of the rounds' segments; a round draws other conversations than the last one.

Goodput: requests per second that meet both objectives. Hit rate: cached over prompt tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple, get_args

from bench.mooncake import TraceRequest, read_trace, sample, scaled
from bench.open_loop import Answer, Objective, closed_loop, open_loop
from bench.report import Row, finish, percentile
from bench.routers import Routers
from router.policies import PolicyName

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
LOADS = (0.5, 0.9)
GOAL = Objective(1.0, 0.05)
"""Some ten times what an idle pool takes for the median request, on two cores of 2.6 GHz."""
STREAMS = 16
WARM = 0.25
WORKER = ("--kv-tokens", "32768", "--max-model-len", "4096")


class Plan(NamedTuple):
    rounds: int
    segment_s: float
    calibration_s: float
    seed: int


class Segment(NamedTuple):
    """What one policy made of one round's requests, those of the warm-up left out."""

    ttft_p50_s: float
    ttft_p90_s: float
    hit_rate: float
    goodput: float
    failed: float  # share
    error: float  # median of |observed - predicted| / observed TTFT
    ratio: float  # median of observed / predicted


def summary(answers: Sequence[Answer], seconds: float) -> Segment:
    """A request that failed, or was refused, counts as one that never had a token."""
    counted = [a for a in answers if a.at >= WARM * seconds]
    ok = [a for a in counted if a.status == 200]
    ttft = [a.ttft_s if a.status == 200 else float("inf") for a in counted]
    return Segment(
        percentile(ttft, 0.5),
        percentile(ttft, 0.9),
        sum(a.cached for a in ok) / max(1, sum(a.prompt for a in ok)),
        sum(a.meets(GOAL) for a in counted) / ((1 - WARM) * seconds),
        1 - len(ok) / len(counted),
        median(abs(a.observed_s - a.predicted_s) / a.observed_s for a in ok),
        median(a.observed_s / a.predicted_s for a in ok),
    )


Results = dict[tuple[float, PolicyName], list[Segment]]


async def calibrate(pool: Routers, trace: Sequence[TraceRequest], plan: Plan) -> float:
    """Requests per second. Every router sees some traffic before it is measured."""
    requests = scaled(sample(trace, 400, plan.seed), 1.0)
    rates = []
    for name in POLICIES:
        salt = secrets.token_hex(8)
        rate = await closed_loop(pool.at[name], requests, salt, STREAMS, plan.calibration_s)
        rates.append(rate)
        print(f"closed loop, {name}: {rate:.1f} requests/s", flush=True)
    return mean(rates)


async def measure(
    pool: Routers, trace: Sequence[TraceRequest], plan: Plan
) -> tuple[float, Results]:
    results: Results = defaultdict(list)
    capacity = await calibrate(pool, trace, plan)
    for turn in range(plan.rounds):
        for load in LOADS:
            count = max(8, round(load * capacity * plan.segment_s))
            requests = sample(trace, count, plan.seed + 1 + turn)
            arrivals = scaled(requests, plan.segment_s)
            shift = turn % len(POLICIES)
            for name in POLICIES[shift:] + POLICIES[:shift]:
                answers = await open_loop(pool.at[name], arrivals, secrets.token_hex(8))
                segment = summary(answers, plan.segment_s)
                results[load, name].append(segment)
                print(f"{load:.0%} {name}: {_line(segment)}", flush=True)
    return capacity, results


def _line(s: Segment) -> str:
    return (
        f"TTFT {s.ttft_p50_s:.3f} / {s.ttft_p90_s:.3f} s, hits {s.hit_rate:.0%},"
        f" goodput {s.goodput:.1f}/s, failed {s.failed:.0%}, prediction off by {s.error:.0%}"
        f" (x{s.ratio:.2f})"
    )


def middle(segments: Sequence[Segment]) -> Segment:
    return Segment(*(median(values) for values in zip(*segments, strict=True)))


def rows(capacity: float, results: Results) -> list[Row]:
    found = [Row("closed loop", capacity, "requests/s")]
    for load in LOADS:
        of = {name: middle(results[load, name]) for name in POLICIES}
        base = of["round-robin"]
        for name, s in of.items():
            at, than = f"{load:.0%}, {name}", "round-robin"
            found += [
                Row(f"{at}: TTFT p50", 1e3 * s.ttft_p50_s, "ms", than, base[0] / s[0]),
                Row(f"{at}: TTFT p90", 1e3 * s.ttft_p90_s, "ms", than, base[1] / s[1]),
                Row(f"{at}: hit rate", s.hit_rate, ""),
                Row(f"{at}: goodput", s.goodput, "requests/s", than, _over(s[3], base[3])),
            ]
        cost = of["cost"]
        found += [
            Row(f"{load:.0%}, cost: prediction off by", cost.error, "of observed TTFT"),
            Row(f"{load:.0%}, cost: observed / predicted", cost.ratio, ""),
        ]
    return found


def _over(value: float, base: float) -> float | None:
    return value / base if base else None


async def run(trace: Sequence[TraceRequest], plan: Plan) -> None:
    goal = ("--ttft-slo-ms", f"{1e3 * GOAL.ttft_s:g}", "--tpot-slo-ms", f"{1e3 * GOAL.tpot_s:g}")
    routers: dict[str, tuple[str, ...]] = {
        name: ("--routing-policy", name, *goal) for name in POLICIES
    }
    with tempfile.TemporaryDirectory(prefix="baton-policies-") as folder:
        pool = Routers(Path(folder), routers, WORKER)
        try:
            await pool.start()
            capacity, results = await measure(pool, trace, plan)
        finally:
            await pool.close()
    finish("routing_policies", rows(capacity, results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="conversation_trace.jsonl")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    quick = Plan(1, 6.0, 3.0, options.seed)
    full = Plan(4, 12.0, 8.0, options.seed)
    asyncio.run(run(read_trace(options.trace), quick if options.quick else full))


if __name__ == "__main__":
    main()
