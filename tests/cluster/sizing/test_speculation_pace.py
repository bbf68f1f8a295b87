"""Decode pools of engines that draft: the pace that is reported is not the pace of another batch.

Sized by the tokens of a step in a small batch, one worker seems to suffice. There the batch grows,
drafts pay less, two seem to be needed, and so on by turns. From what engines report of their drafts
follows the same number of workers whatever batch they have.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from cluster.sizing.demand import demand_by_role
from cluster.sizing.residency import resident_sequences
from cluster.sizing.snapshot import (
    NO_CORRECTIONS,
    MachineModel,
    RequestMix,
    RequestSample,
    SloTargets,
)
from engine.speculation.control.controller import Controller
from engine.speculation.control.latency_curve import LatencyCurve
from engine.speculation.control.step_costs import StepCostModel
from protocol.performance.speculation_profile import SpeculationProfile, decode_pace
from protocol.performance.step_model import StepModel
from tests.engine.speculation_world import SimulatedEngine, SimulatedMachine

# An 8B model in 16 bits on a GPU with 3.35 TB/s: reading the weights takes as long as computing 240
# rows. The proposer is a head of one layer, and 80% of its tokens are accepted.
DEVICE = SimulatedMachine(6.9e-3, 4e-6, ridge=240, steep=22e-6, draft_pass=0.5e-3, draft_row=2e-6)
ACCEPTANCE, DRAFTS = 0.8, 5
PLAIN = MachineModel(
    step=(DEVICE.step, DEVICE.row, 4.9e-8, 2.4e-5, 1e-10),
    chunk=2048,
    max_batch=256,
    kv_tokens=400_000,
    kv_bytes=131_072.0,
)
GOALS = SloTargets(ttft_s=2.0, tpot_s=0.01)
LOAD = RequestMix(rate=40.0, window_s=60.0, samples=(RequestSample(800.0, 0.0, 400.0),))


def report(batch: int) -> tuple[SpeculationProfile, float]:
    """Return what an engine with such a batch reports, and its tokens in the time of a plain
    step."""
    world = SimulatedEngine(DEVICE, lambda sequence, step: ACCEPTANCE, batch, seed=3)
    curve = LatencyCurve([DEVICE.seconds(rows) for rows in range(1, 513)])
    controller = Controller(StepCostModel(curve), DRAFTS, world.passes)
    world.run(controller, 200 * batch)
    pace = world.run(controller, 200 * batch) / batch * DEVICE.seconds(batch)
    profile = controller.profile()
    assert profile is not None
    return profile, pace


def workers(machine: MachineModel) -> int:
    return demand_by_role(LOAD, {"decode": machine}, GOALS, NO_CORRECTIONS)["decode"].workers


def test_pool_does_not_depend_on_the_batch_in_which_drafts_were_observed() -> None:
    few, crowd = report(4), report(128)
    assert few[1] > 2.3 and crowd[1] < 1.6, "the pace of a batch is not that of another one"
    by_pace = [
        workers(replace(PLAIN, step=(*(c / pace for c in PLAIN.step[:3]), *PLAIN.step[3:])))
        for _, pace in (few, crowd)
    ]
    assert by_pace == [1, 2], "what one factor for every batch would do"
    assert [workers(replace(PLAIN, speculation=profile)) for profile, _ in (few, crowd)] == [2, 2]
    assert workers(PLAIN) == 4


def test_pool_meets_the_objective_with_the_pace_of_its_own_batch() -> None:
    profile, _ = report(4)
    machine = replace(PLAIN, speculation=profile)
    found = demand_by_role(LOAD, {"decode": machine}, GOALS, NO_CORRECTIONS)["decode"]
    pace = decode_pace(StepModel(*PLAIN.step), profile, found.each, 1000 * found.each)
    assert 1.0 < pace.tokens < 2.5
    assert pace.tpot_s == pytest.approx(GOALS.tpot_s, rel=1e-3)
    alone = resident_sequences(LOAD, machine)
    batch = alone.mean_batch(LOAD.rate * 400, 256)
    assert alone.tpot_s(batch) > 1.2 * GOALS.tpot_s, "one worker keeps up, in a batch too large"
