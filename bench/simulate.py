"""The simulator's predictions beside a real local cluster.

    python -m bench.simulate [--quick] [--rounds N] [--seed N]

Segments of several kinds of traffic are sent one after the other; each begins when the requests of
the last one have ended. First one prefill and one decode worker serve them at a light load. Three
numbers are fitted to that: two factors on the workers' own coefficients of step times, and the
seconds that a first token spends outside of workers. Then two workers of each role serve segments
at about nine tenths of what they can, and the simulator predicts them: the medians and 90th
percentiles of TTFT and TPOT of each kind, and each request by itself.

Engines are paced (``bench/lib/paced.py``), so that they are as fast as declared devices whatever
the machine.
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
from bench.lib.report import ResultRow, finish, median
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

LOADED: tuple[TrafficPhase, ...] = (
    TrafficPhase("mixed", 25.0, 2.4, 300, 40),
    TrafficPhase("prompts", 25.0, 2.3, 600, 16),
    TrafficPhase("answers", 25.0, 2.6, 128, 80),
    TrafficPhase("bursts", 25.0, 1.8, 350, 50, burstiness=0.4),
)
"""Traffic that two workers of each role bear, with about a tenth to spare."""
LIGHT_SHARE = 0.15
"""Rate of the segments for fitting, relative to ``LOADED``: a third of it for each worker."""


class MeasuredTraffic(NamedTuple):
    """The segments of a run. ``known``: of the cluster that served the loaded ones."""

    light: list[TrafficSegment]
    loaded: list[TrafficSegment]
    known: ClusterConstants


async def measure(
    cluster: PacedCluster, phases: tuple[TrafficPhase, ...], rounds: int, seed: int
) -> MeasuredTraffic:
    """Send light segments to 1 + 1 workers and loaded ones to 2 + 2. The workers' step models are
    those after the light segments."""
    await _send(cluster, phases[0]._replace(seconds=4.0, rate=1.0), 10**6)
    light = [
        await _send(cluster, phase._replace(rate=LIGHT_SHARE * phase.rate), seed + number)
        for number, phase in enumerate(phases * rounds)
    ]
    workers = await cluster.workers()
    step = mean_step_model(parse_step_model(worker.step_model) for worker in workers)
    await asyncio.to_thread(cluster.scale, 2, 2)
    await _send(cluster, phases[0]._replace(seconds=4.0, rate=2.0), 10**6 + 1)
    loaded = [
        await _send(cluster, phase, seed + 1000 + number)
        for number, phase in enumerate(phases * rounds)
    ]
    return MeasuredTraffic(light, loaded, _known(step, workers[0]))


def _known(step: StepModel, worker: WorkerRecord) -> ClusterConstants:
    each = worker.kv_tokens_total, float(worker.model.kv_bytes_per_token)
    return ClusterConstants(step, 2, 2, CHUNK, MAX_BATCH, *each, GOAL)


async def _send(cluster: PacedCluster, phase: TrafficPhase, seed: int) -> TrafficSegment:
    load = arrivals(phase, seed)
    answers = await LoadClient(cluster.url, salt=secrets.token_hex(8)).open_loop(load)
    return TrafficSegment(phase.name, load, answers)


def rows(traffic: MeasuredTraffic) -> list[ResultRow]:
    """Fit the light segments, and compare the predictions of the loaded ones."""
    light, loaded, known = traffic
    fit = fit_segments(light, known._replace(prefill=1, decode=1))
    found = _fit_rows(fit, known.step)
    for name, kind in {"all": loaded, **by_name(loaded)}.items():
        said = [simulated_times(segment, known, fit) for segment in kind]
        truth = [measured_times(segment) for segment in kind]
        found += _compared(name, pooled_percentiles(said), pooled_percentiles(truth))
        for whose, times in (("real", truth), ("predicted", said)):
            refused = sum(pair is None for segment in times for pair in segment)
            found.append(ResultRow(f"{name}: refused or failed, {whose}", refused, ""))
        pairs = [
            (s, t)
            for ours, theirs in zip(said, truth, strict=True)
            for s, t in zip(ours, theirs, strict=True)
            if s is not None and t is not None
        ]
        for place, label in enumerate(("TTFT", "TPOT")):
            off = median([abs(s[place] / t[place] - 1) for s, t in pairs])
            found.append(ResultRow(f"{name}: {label} of a request, median error", off, "share"))
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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(words)
    phases, rounds = LOADED, options.rounds
    if options.quick:
        phases, rounds = tuple(phase._replace(seconds=15.0) for phase in LOADED[1:3]), 1
    with paced_cluster(DEVICE, "--prefill", "1", "--decode", "1", *ROUTER) as cluster:
        traffic = asyncio.run(measure(cluster, phases, rounds, options.seed))
        late = cluster.lateness()
    found = rows(traffic)
    found.append(ResultRow("steps late", late.late_share, "of steps"))
    found.append(ResultRow("steps longer than declared", late.excess_share, "of their time"))
    finish("simulate", found)


if __name__ == "__main__":
    main()
