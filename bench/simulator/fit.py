"""Fits the simulator to segments of a run, and predicts other segments with it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import log
from statistics import median
from typing import NamedTuple

from bench.lib.http_load import Arrival, Objective, StreamTiming
from bench.lib.report import percentile
from cluster.simulator.devices.request import SimulatedRequest
from cluster.simulator.scenario import Scenario, parse_scenario
from cluster.simulator.simulation import Simulation
from protocol.performance.step_model import StepModel
from protocol.roles import Role

_SCALES = (0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0)
_FINER = (0.92, 0.96, 1.0, 1.04, 1.08)
_FINEST = (0.98, 0.99, 1.0, 1.01, 1.02)


class ClusterConstants(NamedTuple):
    """The cluster's constants before anything is fitted; ``step`` is the workers' own model."""

    step: StepModel
    prefill: int
    decode: int
    chunk: int
    max_batch: int
    kv_tokens: int
    kv_bytes: float
    goal: Objective


class StepTimeFit(NamedTuple):
    """Factors on the workers' coefficients, and the seconds that a first token spends outside of
    workers: on the way to the router, in it, and back."""

    decode: float = 1.0
    prompt: float = 1.0
    path_s: float = 0.0


class LatencyPercentiles(NamedTuple):
    """Percentiles over the answered requests, in seconds."""

    ttft_p50: float
    ttft_p90: float
    tpot_p50: float
    tpot_p90: float


class TrafficSegment(NamedTuple):
    """The requests of one segment, and their answers."""

    name: str
    arrivals: Sequence[Arrival]
    answers: Sequence[StreamTiming]


LatencyPairs = list[tuple[float, float] | None]
"""TTFT and TPOT of each request, in seconds; None: it was refused, or it failed."""


def measured_times(segment: TrafficSegment) -> LatencyPairs:
    return [(a.ttft_s, a.tpot_s) if a.status == 200 else None for a in segment.answers]


def simulated_times(
    segment: TrafficSegment, known: ClusterConstants, fit: StepTimeFit
) -> LatencyPairs:
    """Simulate the same arrivals on a cluster that is empty at first."""
    scenario = _scenario(known, fit)
    world = Simulation(scenario)
    jobs = [
        SimulatedRequest(i, a.at, len(a.prompt), a.output) for i, a in enumerate(segment.arrivals)
    ]
    world.run(jobs)
    return [
        None
        if (ttft := job.ttft_s) is None or (tpot := job.tpot_s) is None
        else (ttft + fit.path_s, tpot)
        for job in jobs
    ]


def percentiles(times: LatencyPairs) -> LatencyPercentiles:
    answered = [pair for pair in times if pair is not None]
    ttft, tpot = [t for t, _ in answered], [t for _, t in answered]
    return LatencyPercentiles(
        *(percentile(of, share) for of in (ttft, tpot) for share in (0.5, 0.9))
    )


def pooled_percentiles(times: Sequence[LatencyPairs]) -> LatencyPercentiles:
    return percentiles(list(chain.from_iterable(times)))


def by_name(segments: Sequence[TrafficSegment]) -> dict[str, list[TrafficSegment]]:
    found: dict[str, list[TrafficSegment]] = {}
    for segment in segments:
        found.setdefault(segment.name, []).append(segment)
    return found


def fit_segments(segments: Sequence[TrafficSegment], known: ClusterConstants) -> StepTimeFit:
    """Minimize the errors of the requests, one by one: few of them come in a light load, and what a
    prompt takes shows in how TTFT follows its length.

    The factors are searched one after the other. The time outside of workers only adds to TTFT, so
    the median over the requests gives it directly.
    """
    truth = list(chain.from_iterable(measured_times(segment) for segment in segments))

    def tried(factors: StepTimeFit) -> tuple[float, StepTimeFit]:
        """Return the sum of the errors' logarithms, and the complete fit."""
        said = chain.from_iterable(simulated_times(segment, known, factors) for segment in segments)
        pairs = [
            (s, t) for s, t in zip(said, truth, strict=True) if s is not None and t is not None
        ]
        way = max(0.0, median(t[0] - s[0] for s, t in pairs))
        errors = (abs(log((s[0] + way) / t[0])) + abs(log(s[1] / t[1])) for s, t in pairs)
        return sum(errors), factors._replace(path_s=way)

    best = StepTimeFit()
    for scales in (_SCALES, _FINER, _FINEST):
        of = best._replace(path_s=0.0)
        best = min(tried(of._replace(decode=of.decode * s)) for s in scales)[1]
        of = best._replace(path_s=0.0)
        best = min(tried(of._replace(prompt=of.prompt * s)) for s in scales)[1]
    return best


def _scenario(known: ClusterConstants, fit: StepTimeFit) -> Scenario:
    of = known.step
    step = [c * fit.decode for c in of[:3]] + [c * fit.prompt for c in of[3:5]]
    pools: dict[Role, int] = {"prefill": known.prefill, "decode": known.decode}
    return parse_scenario(
        {
            "seconds": 1.0,
            "machines": {
                "prefill": {
                    "step": step,
                    "chunk": known.chunk,
                    "max_batch": known.max_batch,
                    "kv_tokens": known.kv_tokens,
                    "kv_bytes": known.kv_bytes,
                }
            },
            "pools": pools,
            "objectives": {
                "ttft_ms": 1e3 * known.goal.ttft_s,
                "tpot_ms": 1e3 * known.goal.tpot_s,
            },
            "traffic": {"mixes": [{"rate": 1.0, "prompt": "64", "output": "2"}]},
        }
    )
