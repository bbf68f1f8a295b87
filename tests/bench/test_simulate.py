"""The benchmark of the simulator: what it fits, and what it compares."""

from __future__ import annotations

import pytest

from bench.autoscale_phases import Phase, arrivals
from bench.open_loop import Answer, Objective
from bench.simulate import rows
from bench.simulate_fit import Fit, Known, Segment, on_paper
from router.step_model import StepModel

KNOWN = Known(
    StepModel(0.05, 4e-3, 2e-6, 1e-3, 1e-7), 2, 2, 256, 20, 32768, 4096.0, Objective(2.0, 0.1)
)
TRUTH = Fit(decode=1.15, prompt=1.05, path_s=0.03)
KINDS = (Phase("prompts", 5.0, 1.8, 600, 16), Phase("answers", 5.0, 2.2, 128, 30))


def segment(phase: Phase, seed: int) -> Segment:
    """As a cluster would answer that is as ``TRUTH`` says."""
    sent = arrivals([phase], seed)
    times = on_paper(Segment(phase.name, sent, ()), KNOWN, TRUTH)
    answers = [Answer(a.at, 200, 9.0, *t) for a, t in zip(sent, times, strict=True)]
    return Segment(phase.name, sent, answers)


def test_what_was_fitted_to_some_segments_predicts_the_others() -> None:
    segments = [segment(phase, i) for i, phase in enumerate([KINDS[0]] * 2 + [KINDS[1]] * 2)]
    found = {row.name: row for row in rows(segments, KNOWN)}
    assert found["fitted: factor on decoding"].value == pytest.approx(TRUTH.decode, rel=0.05)
    assert found["fitted: factor on prompts"].value == pytest.approx(TRUTH.prompt, rel=0.05)
    compared = [row for row in found.values() if row.against == "predicted"]
    assert len(compared) == 4 * 3
    for row in compared:
        assert row.ratio == pytest.approx(1.0, abs=0.05)
