"""What a controller reports of its drafts predicts its speed, for its own batch and for others."""

from __future__ import annotations

import numpy as np
import pytest

from engine.scheduling.step_time import StepTimeModel
from engine.speculation.control.controller import Controller
from engine.speculation.control.draft_lengths import StepOutcome
from engine.speculation.control.latency_curve import LatencyCurve
from engine.speculation.control.profile_estimate import ProfileEstimate
from engine.speculation.control.step_costs import StepCostModel
from protocol.performance.draft_choice import BatchCosts
from protocol.performance.speculation_profile import decode_pace
from protocol.performance.step_model import StepModel, StepWork
from tests.engine.speculation.control.test_controller import LARGE, MACHINES, RIDGE, SMALL, always
from tests.engine.speculation_world import SimulatedEngine, SimulatedMachine


def speculating(
    machine: SimulatedMachine, acceptance: float, batch: int
) -> tuple[Controller, float]:
    """Return a controller that has learned, and its tokens per second."""
    world = SimulatedEngine(machine, always(acceptance), batch, seed=1)
    curve = LatencyCurve([machine.seconds(rows) for rows in range(1, 257)])
    controller = Controller(StepCostModel(curve), 8, world.passes)
    world.run(controller, 200 * batch)
    return controller, world.run(controller, 800 * batch)


def predicted(controller: Controller, machine: SimulatedMachine, batch: int) -> float:
    plain = StepModel(machine.seconds(batch), 0.0, 0.0, 0.0, 0.0)
    return batch / decode_pace(plain, controller.profile(), batch, 0).tpot_s


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("acceptance", [0.4, 0.8])
def test_profile_predicts_the_speed_of_its_own_batch(machine: str, acceptance: float) -> None:
    controller, observed = speculating(MACHINES[machine], acceptance, 8)
    assert predicted(controller, MACHINES[machine], 8) == pytest.approx(observed, rel=0.08)


def test_profile_of_a_small_batch_predicts_a_larger_one() -> None:
    learned, _ = speculating(LARGE, 0.8, 4)
    _, observed = speculating(LARGE, 0.8, 24)
    assert predicted(learned, LARGE, 24) == pytest.approx(observed, rel=0.1)
    profile = learned.profile()
    assert profile is not None and profile.is_valid
    assert profile.accept[:4] == pytest.approx([0.8] * 4, abs=0.06)
    assert profile.row_s == pytest.approx(LARGE.row, rel=0.15)


@pytest.mark.parametrize("overhead", [0.0, 0.8e-3, 1.5e-3])
def test_overhead_of_verifying_counts_once(overhead: float) -> None:
    """The step model that the engine reports is fitted to the steps that verify, too."""
    machine = SimulatedMachine(step=2e-3, row=20e-6, draft_pass=0.05e-3, overhead=overhead)
    world, steps = SimulatedEngine(machine, always(0.8), 2, seed=1), StepTimeModel()
    with steps.remembered():  # as an engine measures its largest steps when it starts
        steps.observe(StepWork(256), machine.seconds(256))

    class Measured(Controller):
        def observe(self, outcome: StepOutcome) -> None:
            work = StepWork(len(outcome.sequences) + sum(outcome.proposed))
            steps.observe(work, outcome.step_s - outcome.draft_s)
            super().observe(outcome)

    curve = LatencyCurve([machine.seconds(rows) for rows in range(1, 257)])
    controller = Measured(StepCostModel(curve, lambda: steps.known), 8, world.passes)
    world.run(controller, 2 * 300)
    observed = world.run(controller, 2 * 800)
    assert steps.known is not None
    pace = decode_pace(steps.known, controller.profile(), 2, 0)
    assert pace.tokens > 2.0 and 2 / pace.tpot_s == pytest.approx(observed, rel=0.1)


def test_hinge_is_where_rows_begin_to_cost() -> None:
    def hinge(machine: SimulatedMachine) -> tuple[float, float]:
        return LatencyCurve([machine.seconds(rows) for rows in range(1, 257)]).hinge

    slope, free = hinge(RIDGE)
    assert slope == pytest.approx(RIDGE.steep, rel=0.15) and 32 <= free <= 56
    slope, free = hinge(SMALL)
    assert slope == pytest.approx(SMALL.row, rel=0.15) and free == 1.0
    assert LatencyCurve([1e-3]).hinge[0] == 0.0


def test_nothing_is_reported_before_acceptance_is_known() -> None:
    estimate = ProfileEstimate(4)
    costs = BatchCosts(1.0, np.ones(9), np.arange(5))
    unknown, rows = np.zeros((2, 4)), np.ones((2, 4))
    estimate.add(unknown, rows, costs, 1.0, 0.0)
    assert estimate.profile(0.0, 1.0) is None
    known = unknown.copy()
    known[0] = (0.5, 0.25, 0.0, 0.0)
    estimate.add(known, rows, costs, 1.0, 0.0)
    profile = estimate.profile(0.0, 1.0)
    assert profile is not None and profile.accept[:2] == (0.5, 0.5), "the other one is unknown"
    assert profile.accept[2] < 1e-5


def test_rows_that_are_rarely_proposed_cost_less() -> None:
    """As with prompt lookup: no match, no rows."""
    estimate = ProfileEstimate(2)
    costs = BatchCosts(1.0, np.ones(9), np.array([0, 1, 1]), per_node=0.5)
    estimate.add(np.full((1, 2), 0.2), np.full((1, 2), 0.25), costs, 2.0, 0.25)
    profile = estimate.profile(0.1, 3.0)
    assert profile is not None
    assert (profile.row_s, profile.per_node_s, profile.free_rows) == (0.05, 0.125, 3.0)
    assert (profile.per_step_s, profile.passes_per_node) == (0.25, 0.0)
