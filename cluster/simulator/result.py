"""What came of a simulation, in figures: of requests, pools, decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec
import numpy as np
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from cluster.simulator.autoscaling import Autoscaler
from cluster.simulator.devices.fleet import Fleet
from cluster.simulator.devices.job import Job, Status
from cluster.simulator.devices.request_life import Life
from cluster.simulator.scenario import Scenario
from cluster.simulator.watching import Moment, Watching
from cluster.sizing.snapshot import Goals
from protocol.roles import ROLES

PERCENTILES = (50, 90, 99)


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. Nobody: all 0."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """``ttft_met``, ``tpot_met``, ``both_met``: shares of all requests that arrived, those refused
    or failed included. ``goodput``: requests a second that met both objectives. ``seconds``: of the
    scenario, or to the last arrival; GPUs are counted until the last request has ended, too."""

    name: str
    goals: Goals
    seconds: float
    requests: int
    ok: int
    refused: int
    failed: int
    too_long: int
    moved: int
    goodput: float
    ttft_met: float
    tpot_met: float
    both_met: float
    ttft: Spread
    tpot: Spread
    output_tokens: int
    cached_share: float
    gpu_hours: float
    busy_prefill: float
    busy_decode: float
    loans: int
    reasons: dict[str, int]
    moments: list[Moment]
    events: int = 0
    wall_s: float = 0.0

    def timed(self, wall_s: float, events: int) -> Result:
        return replace(self, wall_s=wall_s, events=events)


def spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread()
    p50, p90, p99 = np.percentile(np.array(values), PERCENTILES).tolist()
    return Spread(mean=float(np.mean(values)), p50=p50, p90=p90, p99=p99)


def met(job: Job, goals: Goals) -> tuple[bool, bool]:
    """TTFT, TPOT. An answer of one token has met the latter when it has met the former."""
    ttft_s, tpot_s = job.ttft_s, job.tpot_s
    if job.status != "ok" or ttft_s is None:
        return False, False
    return ttft_s <= goals.ttft_s, tpot_s is None or tpot_s <= goals.tpot_s


def figures(
    scenario: Scenario,
    jobs: Sequence[Job],
    fleet: Fleet,
    life: Life,
    watching: Watching,
    autoscaler: Autoscaler | None,
) -> Result:
    """``jobs``: all that have ended."""
    goals = scenario.goals
    counted = [job for job in jobs if job.at >= scenario.warm_up_s]
    both = [met(job, goals) for job in counted]
    many = max(1, len(counted))
    last = scenario.seconds or (jobs[-1].at if jobs else 0.0)
    seconds = max(1e-9, last - scenario.warm_up_s)
    kept = {s: sum(job.status == s for job in counted) for s in get_args(Status)}
    answered = [job for job in counted if job.first_s is not None]
    prompts = sum(job.prompt for job in answered)
    busy = {r: watching.busy_s[r] / max(1e-9, watching.worker_s[r]) for r in ROLES}
    return Result(
        name=scenario.name,
        goals=goals,
        seconds=seconds,
        requests=len(counted),
        ok=kept["ok"],
        refused=kept["refused"],
        failed=kept["failed"],
        too_long=kept["too_long"],
        moved=life.moved,
        goodput=sum(a and b for a, b in both) / seconds,
        ttft_met=sum(a for a, _ in both) / many,
        tpot_met=sum(b for _, b in both) / many,
        both_met=sum(a and b for a, b in both) / many,
        ttft=spread([t for job in answered if (t := job.ttft_s) is not None]),
        tpot=spread([t for job in answered if (t := job.tpot_s) is not None]),
        output_tokens=sum(job.output for job in counted if job.status == "ok"),
        cached_share=1 - sum(job.uncached for job in answered) / prompts if prompts else 0.0,
        gpu_hours=fleet.gpu_seconds() / 3600,
        busy_prefill=busy["prefill"],
        busy_decode=busy["decode"],
        loans=fleet.loans,
        reasons=dict(autoscaler.reasons) if autoscaler is not None else {},
        moments=watching.moments,
    )


# MERGED cluster.simulate.show
# A simulation's result as tables.

Row = tuple[str, str]

LATENCIES = ("", "mean", "p50", "p90", "p99")


def of_requests(of: Result) -> list[Row]:
    return [
        ("requests", f"{of.requests} in {_span(of.seconds)}"),
        ("goodput", f"{of.goodput:.3g} requests/s met both objectives"),
        ("both met", f"{of.both_met:.2%}"),
        (f"TTFT within {of.goals.ttft_s * 1e3:g} ms", f"{of.ttft_met:.2%}"),
        (f"TPOT within {of.goals.tpot_s * 1e3:g} ms", f"{of.tpot_met:.2%}"),
        ("refused", str(of.refused)),
        ("failed", str(of.failed)),
        ("too long for a pool", str(of.too_long)),
        ("begun anew elsewhere", str(of.moved)),
        ("prompt tokens cached", f"{of.cached_share:.1%}"),
    ]


def of_pools(of: Result) -> list[Row]:
    hours = of.gpu_hours
    each = of.goodput * of.seconds / (hours * 3600) if hours else 0.0
    rows = [
        ("GPU-hours", f"{hours:.2f}"),
        ("goodput of a GPU", f"{each:.3g} requests/s"),
        ("busy, prefill", f"{of.busy_prefill:.1%}"),
        ("busy, decode", f"{of.busy_decode:.1%}"),
    ]
    if of.reasons:
        told = ", ".join(f"{reason} {count}" for reason, count in sorted(of.reasons.items()))
        rows += [("loans", str(of.loans)), ("decisions", told)]
    return rows


def latencies(of: Result) -> list[tuple[str, ...]]:
    return [_latency("TTFT ms", of.ttft), _latency("TPOT ms", of.tpot)]


def _latency(name: str, of: Spread) -> tuple[str, ...]:
    return (name, *(f"{1e3 * v:.4g}" for v in (of.mean, of.p50, of.p90, of.p99)))


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*head, show_header=any(head), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right" if any(head) else "left"
    for row in rows:
        table.add_row(*row)
    return table


def show(console: Console, of: Result) -> None:
    console.print(f"[bold]{of.name}[/bold]", highlight=False)
    for rows in (of_requests(of), of_pools(of)):
        console.print(_table(("", ""), rows))
        console.print()
    console.print(_table(LATENCIES, latencies(of)))
    speed = f"{of.events} events in {of.wall_s:.1f} s"
    console.print(f"\n{speed}", style="dim")
