"""A segment of a run on paper, and what must be known of a cluster for that."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import log
from statistics import median
from typing import NamedTuple

from bench.mooncake import Arrival
from bench.open_loop import Answer, Objective
from bench.report import percentile
from cluster.settings import Role
from cluster.simulate.job import Job
from cluster.simulate.machines import machines
from cluster.simulate.run import World
from cluster.simulate.scenario import Scenario, parse
from cluster.sizing.policy import decide
from router.step_model import StepModel

_SCALES = (0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0)
_FINER = (0.92, 0.96, 1.0, 1.04, 1.08)
_FINEST = (0.98, 0.99, 1.0, 1.01, 1.02)


class Known(NamedTuple):
    """Of the cluster, before anything is fitted. ``step``: as its workers say."""

    step: StepModel
    prefill: int
    decode: int
    chunk: int
    max_batch: int
    kv_tokens: int
    kv_bytes: float
    goal: Objective


class Fit(NamedTuple):
    """Factors on the workers' own coefficients, and seconds of a first token's way that no worker
    sees: to the router, through it, back."""

    decode: float = 1.0
    prompt: float = 1.0
    path_s: float = 0.0


class Seen(NamedTuple):
    """Percentiles over the requests that were answered; seconds."""

    ttft_p50: float
    ttft_p90: float
    tpot_p50: float
    tpot_p90: float


class Segment(NamedTuple):
    """What was sent, and what became of it."""

    name: str
    arrivals: Sequence[Arrival]
    answers: Sequence[Answer]


Times = list[tuple[float, float]]
"""TTFT and TPOT of each request."""


def real(segment: Segment) -> Times:
    return [(a.ttft_s, a.tpot_s) for a in segment.answers if a.status == 200]


def on_paper(segment: Segment, known: Known, fit: Fit) -> Times:
    """The same arrivals, in the simulator, from an empty cluster on."""
    scenario = _scenario(known, fit)
    world = World(scenario, machines(scenario), decide, False)
    jobs = [Job(i, a.at, len(a.prompt), a.output) for i, a in enumerate(segment.arrivals)]
    world.run(jobs)
    return [
        (ttft + fit.path_s, tpot)
        for job in jobs
        if (ttft := job.ttft_s) is not None and (tpot := job.tpot_s) is not None
    ]


def seen(times: Times) -> Seen:
    ttft, tpot = [t for t, _ in times], [t for _, t in times]
    return Seen(*(percentile(of, share) for of in (ttft, tpot) for share in (0.5, 0.9)))


def together(times: Sequence[Times]) -> Seen:
    return seen(list(chain.from_iterable(times)))


def by_name(segments: Sequence[Segment]) -> dict[str, list[Segment]]:
    found: dict[str, list[Segment]] = {}
    for segment in segments:
        found.setdefault(segment.name, []).append(segment)
    return found


def fitted(segments: Sequence[Segment], known: Known) -> Fit:
    """What leaves the least of the errors over the percentiles of each kind of segments: one factor
    after the other by search; the way of a first token, which only adds, from the medians."""
    kinds = by_name(segments)
    truth = [together([real(segment) for segment in kind]) for kind in kinds.values()]

    def tried(factors: Fit) -> tuple[float, Fit]:
        """The sum of the errors' logarithms, and the fit with its way."""
        said = [
            together([on_paper(segment, known, factors) for segment in kind])
            for kind in kinds.values()
        ]
        ways = [t.ttft_p50 - s.ttft_p50 for s, t in zip(said, truth, strict=True)]
        way = max(0.0, median(ways))
        fit = factors._replace(path_s=way)
        pairs = [
            pair
            for s, t in zip(said, truth, strict=True)
            for pair in zip((s.ttft_p50 + way, s.ttft_p90 + way, *s[2:]), t, strict=True)
        ]
        return sum(abs(log(a / b)) for a, b in pairs), fit

    best = Fit()
    for scales in (_SCALES, _FINER, _FINEST):
        of = best._replace(path_s=0.0)
        best = min(tried(of._replace(decode=of.decode * s)) for s in scales)[1]
        of = best._replace(path_s=0.0)
        best = min(tried(of._replace(prompt=of.prompt * s)) for s in scales)[1]
    return best


def _scenario(known: Known, fit: Fit) -> Scenario:
    of = known.step
    step = [c * fit.decode for c in of[:3]] + [c * fit.prompt for c in of[3:]]
    pools: dict[Role, int] = {"prefill": known.prefill, "decode": known.decode}
    return parse(
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
