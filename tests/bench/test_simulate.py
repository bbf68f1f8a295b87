"""The benchmark of the simulator: what it fits, and what it compares."""

from __future__ import annotations

import pytest

from bench.lib.http_load import Objective, StreamTiming
from bench.simulate import MeasuredTraffic, TrafficPhase, arrivals, rows
from bench.simulator.fit import ClusterConstants, StepTimeFit, TrafficSegment, simulated_times
from protocol.performance.step_model import StepModel

KNOWN = ClusterConstants(
    StepModel(0.05, 4e-3, 2e-6, 1e-3, 1e-7), 2, 2, 256, 20, 32768, 4096.0, Objective(2.0, 0.1)
)
TRUTH = StepTimeFit(decode=1.15, prompt=1.05, path_s=0.03)
KINDS = (TrafficPhase("prompts", 5.0, 1.8, 600, 16), TrafficPhase("answers", 5.0, 2.2, 128, 30))


def segment(phase: TrafficPhase, seed: int, workers: int) -> TrafficSegment:
    """As a cluster of ``workers`` of each role would answer that is as ``TRUTH`` says."""
    sent = arrivals(phase, seed)
    known = KNOWN._replace(prefill=workers, decode=workers)
    times = simulated_times(TrafficSegment(phase.name, sent, ()), known, TRUTH)
    answers = [
        StreamTiming(a.at, 429, 9.0) if t is None else StreamTiming(a.at, 200, 9.0, *t)
        for a, t in zip(sent, times, strict=True)
    ]
    return TrafficSegment(phase.name, sent, answers)


def test_a_fit_to_one_pair_of_workers_predicts_two_pairs_under_load() -> None:
    light = [segment(phase._replace(rate=0.5), i, 1) for i, phase in enumerate(KINDS)]
    loaded = [segment(phase, 9 + i, 2) for i, phase in enumerate(KINDS)]
    found = {row.name: row for row in rows(MeasuredTraffic(light, loaded, KNOWN))}
    assert found["fitted: factor on decoding"].value == pytest.approx(TRUTH.decode, rel=0.05)
    assert found["fitted: factor on prompts"].value == pytest.approx(TRUTH.prompt, rel=0.05)
    compared = [row for row in found.values() if row.against == "predicted"]
    assert len(compared) == 4 * 3
    for row in compared:
        assert row.ratio == pytest.approx(1.0, abs=0.05)
    assert found["all: TTFT of a request, median error"].value < 0.05
    refused = [found[f"all: refused or failed, {whose}"].value for whose in ("real", "predicted")]
    assert refused == [0, 0]
