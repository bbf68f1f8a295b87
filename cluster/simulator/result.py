"""The result of a simulation: figures of requests, pools and decisions, and their tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from cluster.simulator.autoscaling import SimulatedAutoscaler
from cluster.simulator.devices.fleet import SimulatedFleet
from cluster.simulator.devices.lifecycle import RequestLifecycle
from cluster.simulator.devices.request import RequestStatus, SimulatedRequest
from cluster.simulator.fleet_sampler import FleetSample, FleetSampler
from cluster.simulator.scenario import Scenario
from cluster.sizing.snapshot import SloTargets
from protocol.roles import ROLES

PERCENTILES = (50, 90, 99)
LATENCIES = ("", "mean", "p50", "p90", "p99")

ResultRow = tuple[str, str]


class SimulatedLatency(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and percentiles in seconds; all are 0 without a value."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `baton simulate --json` prints.

    ``ttft_met``, ``tpot_met``, ``both_met``: shares of all requests that arrived, refused and
    failed ones included. ``goodput``: requests/s that met both objectives. ``seconds``: duration of
    the scenario, or time of the last arrival, without the warm-up. ``gpu_hours``: of all workers
    from the warm-up's end until then, because what comes later depends on how long a policy waits,
    not on the load. ``moved``, ``preempted``, ``loans``, ``reasons`` and the ``busy_*`` shares are
    of the time after the warm-up. ``moments``, samples of the fleet, and ``events`` include it.
    """

    name: str
    goals: SloTargets
    seconds: float
    requests: int
    ok: int
    refused: int
    failed: int
    too_long: int
    moved: int
    preempted: int
    goodput: float
    ttft_met: float
    tpot_met: float
    both_met: float
    ttft: SimulatedLatency
    tpot: SimulatedLatency
    output_tokens: int
    cached_share: float
    gpu_hours: float
    busy_prefill: float
    busy_decode: float
    loans: int
    reasons: dict[str, int]
    moments: list[FleetSample]
    events: int = 0
    wall_s: float = 0.0


def summarize_latency(values: Sequence[float]) -> SimulatedLatency:
    if not values:
        return SimulatedLatency()
    p50, p90, p99 = np.percentile(np.array(values), PERCENTILES).tolist()
    return SimulatedLatency(mean=float(np.mean(values)), p50=p50, p90=p90, p99=p99)


def meets_objectives(request: SimulatedRequest, goals: SloTargets) -> tuple[bool, bool]:
    """Return whether TTFT and TPOT are met; an output of one token meets the latter with the
    former."""
    ttft_s, tpot_s = request.ttft_s, request.tpot_s
    if request.status != "ok" or ttft_s is None:
        return False, False
    return ttft_s <= goals.ttft_s, tpot_s is None or tpot_s <= goals.tpot_s


def summarize_run(
    scenario: Scenario,
    requests: Sequence[SimulatedRequest],
    fleet: SimulatedFleet,
    lifecycle: RequestLifecycle,
    sampler: FleetSampler,
    autoscaler: SimulatedAutoscaler | None,
) -> SimulationResult:
    """Compute the result from ``requests``, all of which have ended."""
    goals = scenario.goals
    counted = [r for r in requests if r.at >= scenario.warm_up_s]
    met = [meets_objectives(r, goals) for r in counted]
    many = max(1, len(counted))
    last = scenario.seconds or (requests[-1].at if requests else 0.0)
    seconds = max(1e-9, last - scenario.warm_up_s)
    by_status = {s: sum(r.status == s for r in counted) for s in get_args(RequestStatus)}
    answered = [r for r in counted if r.first_s is not None]
    prompts = sum(r.prompt for r in answered)
    gpus = scenario.machines.gpus
    gpu_s = fleet.gpu_seconds(last, gpus) - fleet.gpu_seconds(last - seconds, gpus)
    busy = {r: sampler.busy_s[r] / max(1e-9, sampler.worker_s[r]) for r in ROLES}
    return SimulationResult(
        name=scenario.name,
        goals=goals,
        seconds=seconds,
        requests=len(counted),
        ok=by_status["ok"],
        refused=by_status["refused"],
        failed=by_status["failed"],
        too_long=by_status["too_long"],
        moved=lifecycle.moved,
        preempted=lifecycle.preempted,
        goodput=sum(a and b for a, b in met) / seconds,
        ttft_met=sum(a for a, _ in met) / many,
        tpot_met=sum(b for _, b in met) / many,
        both_met=sum(a and b for a, b in met) / many,
        ttft=summarize_latency([t for r in answered if (t := r.ttft_s) is not None]),
        tpot=summarize_latency([t for r in answered if (t := r.tpot_s) is not None]),
        output_tokens=sum(r.output for r in counted if r.status == "ok"),
        cached_share=1 - sum(r.uncached for r in answered) / prompts if prompts else 0.0,
        gpu_hours=gpu_s / 3600,
        busy_prefill=busy["prefill"],
        busy_decode=busy["decode"],
        loans=fleet.loans,
        reasons=dict(autoscaler.reasons) if autoscaler is not None else {},
        moments=sampler.samples,
    )


def request_rows(result: SimulationResult) -> list[ResultRow]:
    return [
        ("requests", f"{result.requests} in {_span(result.seconds)}"),
        ("goodput", f"{result.goodput:.3g} requests/s met both objectives"),
        ("both met", f"{result.both_met:.2%}"),
        (f"TTFT within {result.goals.ttft_s * 1e3:g} ms", f"{result.ttft_met:.2%}"),
        (f"TPOT within {result.goals.tpot_s * 1e3:g} ms", f"{result.tpot_met:.2%}"),
        ("refused", str(result.refused)),
        ("failed", str(result.failed)),
        ("too long for the KV pool", str(result.too_long)),
        ("continued on another worker", str(result.moved)),
        ("preempted because the KV pool was full", str(result.preempted)),
        ("prompt tokens cached", f"{result.cached_share:.1%}"),
    ]


def pool_rows(result: SimulationResult) -> list[ResultRow]:
    hours = result.gpu_hours
    each = result.goodput * result.seconds / (hours * 3600) if hours else 0.0
    rows = [
        ("GPU-hours", f"{hours:.2f}"),
        ("goodput per GPU", f"{each:.3g} requests/s"),
        ("steps run, prefill", f"{result.busy_prefill:.1%}"),
        ("steps run, decode", f"{result.busy_decode:.1%}"),
    ]
    if result.reasons:
        counts = ", ".join(f"{reason} {count}" for reason, count in sorted(result.reasons.items()))
        rows += [("loans", str(result.loans)), ("decisions", counts)]
    return rows


def latency_rows(result: SimulationResult) -> list[tuple[str, ...]]:
    return [_latency("TTFT ms", result.ttft), _latency("TPOT ms", result.tpot)]


def _latency(name: str, found: SimulatedLatency) -> tuple[str, ...]:
    return (name, *(f"{1e3 * v:.4g}" for v in (found.mean, found.p50, found.p90, found.p99)))


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*head, show_header=any(head), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right" if any(head) else "left"
    for row in rows:
        table.add_row(*row)
    return table


def print_result(console: Console, result: SimulationResult) -> None:
    console.print(f"[bold]{result.name}[/bold]", highlight=False)
    for rows in (request_rows(result), pool_rows(result)):
        console.print(_table(("", ""), rows))
        console.print()
    console.print(_table(LATENCIES, latency_rows(result)))
    speed = f"{result.events} events in {result.wall_s:.1f} s"
    console.print(f"\n{speed}", style="dim")
