"""The simulator's predictions against a real local cluster.

    python -m bench.simulate [--quick] [--unpaced] [--rounds N] [--seed N]

Segments of several kinds of traffic are sent to a cluster of two prefill and two decode workers,
one after the other; each begins when the last one's requests have ended. What the simulator must
know is fitted to every other segment: the workers' own coefficients of step times, two factors on
these, and the seconds of a first token's way outside of workers. Then the segments in between are
predicted, and compared: medians and 90th percentiles of TTFT and TPOT.

Engines are paced (``bench/paced.py``): as quick as declared devices, whatever the machine.
``--unpaced``: one prefill and one decode worker as they are, on whose cores the router and the load
generator compute, too, which no simulator knows of.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from bench.autoscale_phases import Phase, arrivals
from bench.open_loop import Objective, open_loop
from bench.paced_cluster import CHUNK, DEVICE, MAX_BATCH, PacedCluster, paced_cluster
from bench.report import Row, finish
from bench.simulate_fit import Fit, Known, Seen, Segment, by_name, fitted, on_paper, real, together
from protocol.directory import WorkerRecord
from router.step_model import StepModel, parse, pooled

GOAL = Objective(2.0, 0.1)
ROUTER = ("--ttft-slo-ms", "2000", "--tpot-slo-ms", "100")

PACED = (
    Phase("light", 25.0, 0.8, 300, 40),
    Phase("prompts", 25.0, 1.8, 600, 16),
    Phase("answers", 25.0, 2.2, 128, 80),
    Phase("bursts", 25.0, 1.6, 350, 50, burstiness=0.4),
)
UNPACED = (
    Phase("light", 25.0, 2.0, 300, 40),
    Phase("prompts", 25.0, 4.0, 600, 16),
    Phase("answers", 25.0, 3.0, 128, 80),
    Phase("bursts", 25.0, 3.0, 350, 50, burstiness=0.4),
)


class Plan(NamedTuple):
    phases: Sequence[Phase]
    rounds: int  # each with two segments of every phase
    workers: int  # of each pool
    paced: bool
    seed: int


def plan(*, quick: bool, paced: bool, rounds: int, seed: int) -> Plan:
    phases: Sequence[Phase] = PACED if paced else UNPACED
    if quick:
        rounds = 1
        phases = tuple(phase._replace(seconds=8.0) for phase in phases[1:3])
    return Plan(phases, rounds, 2 if paced else 1, paced, seed)


async def measure(cluster: PacedCluster, of: Plan) -> tuple[list[Segment], Known]:
    """Segments in the order of time: every other one is for fitting. What is known is what the
    workers say at the end of those."""
    found: list[Segment] = []
    models: list[StepModel] = []
    await _send(cluster, of.phases[0]._replace(seconds=4.0, rate=2.0), 10**6)
    for number in range(2 * of.rounds * len(of.phases)):
        phase = of.phases[number // 2 % len(of.phases)]
        found.append(await _send(cluster, phase, of.seed + number))
        workers = await cluster.workers()
        if number % 2 == 0:
            models.append(pooled(parse(worker.step_model) for worker in workers))
    step = StepModel(*(sum(c) / len(models) for c in zip(*models, strict=True)))
    return found, _known(step, workers[0], of)


def _known(step: StepModel, worker: WorkerRecord, of: Plan) -> Known:
    each = worker.kv_tokens_total, float(worker.model.kv_bytes_per_token)
    return Known(step, of.workers, of.workers, CHUNK, MAX_BATCH, *each, GOAL)


async def _send(cluster: PacedCluster, phase: Phase, seed: int) -> Segment:
    load = arrivals([phase], seed)
    answers = await open_loop(cluster.url, load, secrets.token_hex(8))
    return Segment(phase.name, load, answers)


def rows(segments: Sequence[Segment], known: Known) -> list[Row]:
    fit = fitted(segments[::2], known)
    checked = segments[1::2]
    failed = sum(a.status != 200 for segment in segments for a in segment.answers)
    found = _fit_rows(fit, known.step)
    found.append(Row("requests that failed", failed, ""))
    for name, kind in {"all": checked, **by_name(checked)}.items():
        said = together([on_paper(segment, known, fit) for segment in kind])
        found += _compared(name, said, together([real(segment) for segment in kind]))
    return found


def _fit_rows(fit: Fit, step: StepModel) -> list[Row]:
    names = (("step", "s"), ("sequence", "s"), ("KV token", "s"), ("prompt token", "s"))
    found = [Row(f"c: {n}", c, unit) for (n, unit), c in zip(names, step, strict=False)]
    return [
        *found,
        Row("fitted: factor on decoding", fit.decode, ""),
        Row("fitted: factor on prompts", fit.prompt, ""),
        Row("fitted: way of a first token", 1e3 * fit.path_s, "ms"),
    ]


def _compared(name: str, said: Seen, truth: Seen) -> list[Row]:
    labels = ("TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90")
    return [
        Row(f"{name}: {label} real", 1e3 * value, "ms", "predicted", ratio)
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
        found.append(Row("steps late", late.late_share, "of steps"))
        found.append(Row("steps longer than declared", late.excess_share, "of their time"))
    finish("simulate" if of.paced else "simulate_unpaced", found)


if __name__ == "__main__":
    main()
