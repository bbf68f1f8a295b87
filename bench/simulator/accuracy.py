"""The simulator's predictions beside a real local cluster.

    python -m bench.simulator.accuracy [--quick] [--unpaced] [--rounds N] [--seed N]

Segments of several kinds of traffic are sent to a cluster of two prefill and two decode workers,
one after the other; each begins when the requests of the last one have ended. Three numbers are
fitted to every other segment: two factors on the workers' own coefficients of step times, and the
seconds that a first token spends outside of workers. Then the segments in between are predicted and
compared by the medians and 90th percentiles of TTFT and TPOT.

Engines are paced (``bench/lib/paced.py``), so that they are as fast as declared devices whatever
the machine. With ``--unpaced`` the cluster is one prefill and one decode worker as they are; the
router and the load generator then compute on the same cores, which the simulator does not model.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from bench.lib.http_load import Arrival, LoadClient, Objective
from bench.lib.paced_cluster import CHUNK, DEVICE, MAX_BATCH, PacedCluster, paced_cluster
from bench.lib.report import ResultRow, finish
from bench.simulator.fit import (
    ClusterConstants,
    LatencyPercentiles,
    StepTimeFit,
    TrafficSegment,
    by_name,
    fit_segments,
    measured_times,
    pooled_percentiles,
    simulated_times,
)
from cluster.workloads.distributions import draw_gap
from protocol.performance.step_model import StepModel, mean_step_model, parse_step_model
from protocol.registry.directory import WorkerRecord

FIRST_ID, VOCAB = 3, 4096


class TrafficPhase(NamedTuple):
    """Some seconds of traffic at ``rate`` requests per second with gamma arrivals.

    Lengths in tokens are uniform from half to one and a half of their mean. A ``burstiness`` of 1
    is a Poisson process; smaller values come in bursts.
    """

    name: str
    seconds: float
    rate: float
    prompt: int
    output: int
    burstiness: float = 1.0


def arrivals(phase: TrafficPhase, seed: int) -> list[Arrival]:
    """Draw the requests of one phase; their random prompts share no prefix."""
    draw = random.Random(seed)
    found, at = [], 0.0
    while at < phase.seconds:
        prompt = [draw.randrange(FIRST_ID, VOCAB) for _ in range(_length(phase.prompt, draw))]
        found.append(Arrival(at, prompt, _length(phase.output, draw)))
        at += draw_gap("gamma", phase.rate, phase.burstiness, draw)
    return found


def _length(mean: int, draw: random.Random) -> int:
    return max(2, draw.randint(mean // 2, mean + mean // 2))


GOAL = Objective(2.0, 0.1)
ROUTER = ("--ttft-slo-ms", "2000", "--tpot-slo-ms", "100")

PACED = (
    TrafficPhase("light", 25.0, 0.8, 300, 40),
    TrafficPhase("prompts", 25.0, 1.8, 600, 16),
    TrafficPhase("answers", 25.0, 2.2, 128, 80),
    TrafficPhase("bursts", 25.0, 1.6, 350, 50, burstiness=0.4),
)
UNPACED = (
    TrafficPhase("light", 25.0, 2.0, 300, 40),
    TrafficPhase("prompts", 25.0, 4.0, 600, 16),
    TrafficPhase("answers", 25.0, 3.0, 128, 80),
    TrafficPhase("bursts", 25.0, 3.0, 350, 50, burstiness=0.4),
)


class AccuracyPlan(NamedTuple):
    """The traffic, and the cluster that serves it."""

    phases: Sequence[TrafficPhase]
    rounds: int  # each with two segments of every phase
    workers: int  # of each pool
    paced: bool
    seed: int


def plan(*, quick: bool, paced: bool, rounds: int, seed: int) -> AccuracyPlan:
    phases: Sequence[TrafficPhase] = PACED if paced else UNPACED
    if quick:
        rounds = 1
        phases = tuple(phase._replace(seconds=8.0) for phase in phases[1:3])
    return AccuracyPlan(phases, rounds, 2 if paced else 1, paced, seed)


async def measure(
    cluster: PacedCluster, of: AccuracyPlan
) -> tuple[list[TrafficSegment], ClusterConstants]:
    """Send all segments in turn, and average the workers' step models over those for fitting."""
    found: list[TrafficSegment] = []
    models: list[StepModel] = []
    await _send(cluster, of.phases[0]._replace(seconds=4.0, rate=2.0), 10**6)
    for number in range(2 * of.rounds * len(of.phases)):
        phase = of.phases[number // 2 % len(of.phases)]
        found.append(await _send(cluster, phase, of.seed + number))
        workers = await cluster.workers()
        if number % 2 == 0:
            models.append(
                mean_step_model(parse_step_model(worker.step_model) for worker in workers)
            )
    step = StepModel(*(sum(c) / len(models) for c in zip(*models, strict=True)))
    return found, _known(step, workers[0], of)


def _known(step: StepModel, worker: WorkerRecord, of: AccuracyPlan) -> ClusterConstants:
    each = worker.kv_tokens_total, float(worker.model.kv_bytes_per_token)
    return ClusterConstants(step, of.workers, of.workers, CHUNK, MAX_BATCH, *each, GOAL)


async def _send(cluster: PacedCluster, phase: TrafficPhase, seed: int) -> TrafficSegment:
    load = arrivals(phase, seed)
    answers = await LoadClient(cluster.url, salt=secrets.token_hex(8)).open_loop(load)
    return TrafficSegment(phase.name, load, answers)


def rows(segments: Sequence[TrafficSegment], known: ClusterConstants) -> list[ResultRow]:
    fit = fit_segments(segments[::2], known)
    checked = segments[1::2]
    failed = sum(a.status != 200 for segment in segments for a in segment.answers)
    found = _fit_rows(fit, known.step)
    found.append(ResultRow("requests that failed", failed, ""))
    for name, kind in {"all": checked, **by_name(checked)}.items():
        said = pooled_percentiles([simulated_times(segment, known, fit) for segment in kind])
        found += _compared(
            name, said, pooled_percentiles([measured_times(segment) for segment in kind])
        )
    return found


def _fit_rows(fit: StepTimeFit, step: StepModel) -> list[ResultRow]:
    names = (("step", "s"), ("sequence", "s"), ("KV token", "s"), ("prompt token", "s"))
    found = [ResultRow(f"c: {n}", c, unit) for (n, unit), c in zip(names, step, strict=False)]
    return [
        *found,
        ResultRow("fitted: factor on decoding", fit.decode, ""),
        ResultRow("fitted: factor on prompts", fit.prompt, ""),
        ResultRow("fitted: way of a first token", 1e3 * fit.path_s, "ms"),
    ]


def _compared(name: str, said: LatencyPercentiles, truth: LatencyPercentiles) -> list[ResultRow]:
    labels = ("TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90")
    return [
        ResultRow(f"{name}: {label} real", 1e3 * value, "ms", "predicted", ratio)
        for label, value, ratio in zip(
            labels, truth, (s / t for s, t in zip(said, truth, strict=True)), strict=True
        )
    ]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two kinds, one round, short")
    parser.add_argument("--unpaced", action="store_true", help="engines as they are, 1 + 1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(words)
    of = plan(
        quick=options.quick, paced=not options.unpaced, rounds=options.rounds, seed=options.seed
    )
    count = str(of.workers)
    pools = ("--prefill", count, "--decode", count)
    with paced_cluster(DEVICE if of.paced else None, *pools, *ROUTER) as cluster:
        segments, known = asyncio.run(measure(cluster, of))
        late = cluster.lateness()
    found = rows(segments, known)
    if of.paced:
        found.append(ResultRow("steps late", late.late_share, "of steps"))
        found.append(ResultRow("steps longer than declared", late.excess_share, "of their time"))
    finish("accuracy" if of.paced else "accuracy_unpaced", found)


if __name__ == "__main__":
    main()
