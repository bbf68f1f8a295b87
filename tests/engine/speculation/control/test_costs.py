"""What a step costs: the curve that is measured, and how it is followed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from engine.model_config.config import padded_rows
from engine.speculation.control.draft_lengths import StepOutcome
from engine.speculation.control.latency_curve import LatencyCurve, calibrate, curve_from_knots
from engine.speculation.control.step_costs import ProposalCost, StepCostModel
from protocol.performance.step_model import StepModel


class Machine:
    """A staircase; the first pass of each size is slow, and a clock that it moves."""

    def __init__(self, step: float = 2e-3, row: float = 1e-4, noise: float = 0.0) -> None:
        self.now = 0.0
        self.ran: list[int] = []
        self._step, self._row, self._noise = step, row, noise
        self._draw = random.Random(4)

    def seconds(self, rows: int) -> float:
        return self._step + self._row * padded_rows(rows)

    def run(self, rows: int) -> None:
        first = rows not in self.ran
        self.ran.append(rows)
        late = 1.0 + self._noise * self._draw.random()
        self.now += self.seconds(rows) * late + first * 5e-3


def test_calibrated_curve_matches_pass_times() -> None:
    machine = Machine(noise=0.15)
    curve = calibrate(machine.run, 128, lambda: machine.now)
    for rows in range(1, 129):
        assert curve(rows) == pytest.approx(machine.seconds(rows), rel=0.2)
    assert np.all(np.diff(curve.span(1, 128)) >= 0)
    assert machine.now < 1.2


def test_a_large_model_is_measured_where_it_matters() -> None:
    """At 100 ms a pass there is no time for all sizes."""
    machine = Machine(step=0.1, row=1e-3)
    curve = calibrate(machine.run, 512, lambda: machine.now)
    assert machine.now < 2.0
    assert set(machine.ran) >= {1, 8, 32}
    for rows in (1, 2, 40, 300, 2000):
        assert curve(rows) == pytest.approx(machine.seconds(rows), rel=0.2)


def test_curve_interpolates_and_extrapolates() -> None:
    curve = curve_from_knots([1, 2, 4, 8], [1.0, 1.0, 3.0, 5.0])
    assert [curve(rows) for rows in (1, 2, 3, 4, 6, 8)] == [1.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert curve(10) == pytest.approx(6.0)
    assert list(curve.span(7, 9)) == pytest.approx([4.5, 5.0, 5.5])


def test_disturbed_knot_is_lowered_to_the_next() -> None:
    curve = curve_from_knots([1, 2, 4, 8], [1.0, 9.0, 3.0, 5.0])
    assert [curve(rows) for rows in (1, 2, 4, 8)] == [1.0, 3.0, 3.0, 5.0]


def step(batch: int, proposed: list[int], step_s: float, draft_s: float) -> StepOutcome:
    """Return a step over ``batch`` sequences; none of them is looked at."""
    sequences: list[Any] = [None] * batch
    return StepOutcome(sequences, proposed, (), 0, draft_s, step_s, 0, chunked=False)


def observe_steps(costs: StepCostModel, batch: int, nodes: int, ratio: float, steps: int) -> None:
    for _ in range(steps):
        took = costs.curve(batch + nodes) * ratio
        proposed = [nodes // batch] * batch if nodes else []
        costs.observe(step(batch, proposed, took + 1e-3, 1e-3))


def test_the_overhead_of_verifying_is_learned_from_steps() -> None:
    curve = LatencyCurve(np.linspace(1e-2, 2e-2, 65))
    costs = StepCostModel(curve)
    observe_steps(costs, 4, 0, 1.2, 50)
    assert costs.plain(4, 0) == pytest.approx(1.2 * curve(4))
    assert costs.verify(4, 8, 0, 0)[8] == pytest.approx(1.2 * curve(12))
    observe_steps(costs, 4, 8, 1.5, 80)
    assert costs.verify(4, 8, 0, 0)[8] == pytest.approx(1.5 * curve(12), rel=0.01)
    assert costs.plain(4, 0) == pytest.approx(1.2 * curve(4), rel=0.03)


def test_slower_machine_raises_both_costs() -> None:
    curve = LatencyCurve(np.linspace(1e-2, 2e-2, 65))
    costs = StepCostModel(curve)
    observe_steps(costs, 4, 0, 1.0, 50)
    for _ in range(10):
        observe_steps(costs, 4, 4, 1.1, 8)
        observe_steps(costs, 4, 0, 1.0, 1)
    observe_steps(costs, 4, 0, 1.4, 400)
    assert costs.verify(4, 4, 0, 0)[4] == pytest.approx(1.54 * curve(8), rel=0.05)


def test_faster_machine_while_speculating_lowers_both_costs() -> None:
    """Plain steps are seldom then; they are as much quicker as the others are."""
    curve = LatencyCurve(np.linspace(1e-2, 2e-2, 65))
    costs = StepCostModel(curve)
    observe_steps(costs, 4, 0, 1.6, 50)
    for _ in range(10):
        observe_steps(costs, 4, 4, 1.1, 8)
        observe_steps(costs, 4, 0, 1.0, 1)
    assert costs.plain(4, 0) == pytest.approx(curve(4), rel=0.06)
    assert costs.verify(4, 4, 0, 0)[4] == pytest.approx(1.1 * curve(8), rel=0.03)


def test_single_slow_step_is_cut_as_an_outlier() -> None:
    curve = LatencyCurve(np.linspace(1e-2, 2e-2, 65))
    costs = StepCostModel(curve)
    observe_steps(costs, 1, 0, 1.0, 50)
    observe_steps(costs, 1, 0, 30.0, 1)
    observe_steps(costs, 1, 4, 30.0, 1)
    assert costs.plain(1, 0) < 1.12 * curve(1)
    assert costs.verify(1, 4, 0, 0)[4] < 1.7 * curve(5)


def test_reading_kv_costs_what_the_engine_s_model_says() -> None:
    line = StepModel(0.0, 0.0, 1e-6, 0.0, 0.0)
    costs = StepCostModel(LatencyCurve([1e-2] * 8), lambda: line)
    assert costs.plain(4, 5000) == pytest.approx(1.5e-2)
    assert costs.verify(4, 2, 0, 5000)[2] == pytest.approx(1.5e-2)


def test_prefill_time_is_not_attributed_to_draft_nodes() -> None:
    curve = LatencyCurve(np.concatenate([np.full(64, 1e-2), 1e-2 + 1e-4 * np.arange(1, 1000)]))
    costs = StepCostModel(curve)
    alone, beside = costs.verify(8, 16, 0, 0), costs.verify(8, 16, 512, 0)
    assert alone[16] == pytest.approx(curve(8))  # below the ridge rows cost nothing
    assert beside[0] == pytest.approx(curve(8))
    assert beside[16] == pytest.approx(curve(8) + 16e-4)


@pytest.mark.parametrize(("per_pass", "per_node"), [(4e-4, 1e-5), (0.0, 2e-5), (1e-3, 0.0)])
def test_proposal_cost_is_fitted(per_pass: float, per_node: float) -> None:
    draw, proposing = random.Random(5), ProposalCost()
    proposing.observe(1, 1, 80e-3)  # what the first call makes ready is not what calls cost
    for _ in range(60):
        passes, batch = draw.randrange(1, 9), draw.randrange(1, 33)
        seconds = (per_pass * passes + per_node * passes * batch) * draw.uniform(0.97, 1.03)
        proposing.observe(passes, passes * batch, seconds)
    assert proposing.per_pass == pytest.approx(per_pass, rel=0.1, abs=1e-5)
    assert proposing.per_node == pytest.approx(per_node, rel=0.1, abs=1e-6)


def padded_to_a_power_of_two(sequences: int, nodes: int, _kv_tokens: int) -> int:
    return sequences * (1 << nodes.bit_length())


def test_recorded_steps_cost_what_their_rows_do() -> None:
    curve = LatencyCurve(np.linspace(1e-2, 2e-2, 65))
    costs = StepCostModel(curve, rows=padded_to_a_power_of_two)
    seconds = costs.padded(4, 4, 0)
    assert seconds is not None
    assert seconds.tolist() == pytest.approx([curve(rows) for rows in (4, 8, 16, 16, 32)])
    for _ in range(80):  # one sequence with three nodes makes room for three of each
        costs.observe(step(4, [3, 0, 0, 0], 1.2 * curve(16), 0.0))
        costs.observe(step(4, [], curve(4), 0.0))
    seconds = costs.padded(4, 4, 0)
    assert seconds is not None and seconds[3] == pytest.approx(1.2 * curve(16), rel=0.02)
    assert StepCostModel(curve).padded(4, 4, 0) is None


def test_drafts_that_are_not_proposed_make_no_room_for_nodes() -> None:
    costs = StepCostModel(LatencyCurve(np.linspace(1e-2, 2e-2, 65)), rows=lambda *_: 32)
    plain = costs.plain(4, 0)
    assert costs.extra_seconds(step(4, [], plain + 1e-3, 1e-3), plain) == pytest.approx(1e-3)
    assert costs.extra_seconds(step(4, [3, 0, 0, 0], 0.0, 0.0), plain) > 1e-3


def test_curve_knows_where_passes_begin_to_take_much_longer() -> None:
    """On a GPU passes of up to 256 rows are recorded. Few counts fit into the budget here."""
    now = 0.0

    def run(rows: int) -> None:
        nonlocal now
        now += 1.3e-3 + 3e-6 * rows if rows <= 256 else 8e-3

    curve = calibrate(run, 512, lambda: now, budget_s=0.2)
    assert curve(512) == pytest.approx(8e-3)
    assert curve(64) == pytest.approx(1.3e-3 + 3e-6 * 64)
