"""What came of a simulation, in figures: of requests, pools, decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec
import numpy as np
from msgspec.structs import replace

from cluster.simulate.fleet import Fleet
from cluster.simulate.job import Job, Status
from cluster.simulate.life import Life
from cluster.simulate.moment import Moment
from cluster.simulate.scaling import Autoscaler
from cluster.simulate.scenario import Scenario
from cluster.simulate.watching import Watching
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
