"""The controller against an engine of numbers: speculation pays where it can, and never costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from engine.scheduling.sequence import Sequence
from engine.speculation.control.controller import Controller
from engine.speculation.control.draft_lengths import (
    DraftLengthPolicy,
    FixedDraftLength,
    StepOutcome,
)
from engine.speculation.control.latency_curve import LatencyCurve
from engine.speculation.control.step_costs import StepCostModel
from protocol.performance.draft_choice import expected_tokens
from tests.engine.speculation_world import Acceptance, SimulatedEngine, SimulatedMachine

MOST = 8

LARGE = SimulatedMachine(step=14e-3, row=0.22e-3)
SMALL = SimulatedMachine(step=1.8e-3, row=0.165e-3, draft_pass=0.4e-3)
RIDGE = SimulatedMachine(step=10e-3, row=0.01e-3, ridge=48, steep=0.4e-3)
LOOKUP = replace(SMALL, draft_pass=20e-6, draft_row=0.0)
MACHINES = {"large": LARGE, "small": SMALL, "ridge": RIDGE}


def always(acceptance: float) -> Acceptance:
    return lambda sequence, step: acceptance


def odd(sequence: Sequence, step: int) -> bool:
    return sequence.handle % 2 == 1


def controller(world: SimulatedEngine, curve: LatencyCurve | None = None) -> Controller:
    machine = world.machine
    measured = LatencyCurve([machine.seconds(rows) for rows in range(1, 257)])
    computed = world.computed
    rows = None if computed is None else lambda batch, nodes, _: computed(batch, nodes)
    return Controller(StepCostModel(curve or measured, rows=rows), MOST, world.passes)


@dataclass(frozen=True)
class Ran:
    """The controller's run beside that of plain decoding, over several draws of chance."""

    speedup: float
    worlds: list[SimulatedEngine]
    controllers: list[Controller]


def run(steps: int, seeds: int = 2, **world: Any) -> Ran:
    """So many plain steps' worth of tokens."""
    plain_s = took_s = 0.0
    worlds, controllers = [], []
    for seed in range(seeds):
        plain, other = SimulatedEngine(seed=seed, **world), SimulatedEngine(seed=seed, **world)
        tokens = steps * plain.batch
        plain_s += tokens / plain.run(FixedDraftLength(0), tokens)
        controllers.append(controller(other))
        took_s += tokens / other.run(controllers[-1], tokens)
        worlds.append(other)
    return Ran(plain_s / took_s, worlds, controllers)


def best(machine: SimulatedMachine, acceptance: float, batch: int) -> float:
    """Speed-up of the best length for all, as the formula has it."""

    def seconds(nodes: int) -> float:
        drafting = machine.draft_pass * nodes + machine.draft_row * batch * nodes
        return machine.seconds(batch * (1 + nodes)) + drafting

    lengths = range(1, MOST + 1)
    values = [expected_tokens(acceptance, k) / seconds(k) for k in lengths]
    return max(values) * machine.seconds(batch)


# ---- it never costs ---------------------------------------------------------------------------


@pytest.mark.parametrize("machine", list(MACHINES))
@pytest.mark.parametrize("batch", [1, 4, 16, 64])
def test_a_draft_that_is_always_wrong_costs_nothing(machine: str, batch: int) -> None:
    ran = run(600, machine=MACHINES[machine], acceptance=always(0.0), batch=batch)
    assert ran.speedup > 0.985
    assert all(control.speedups()[0] == 1.0 for control in ran.controllers)


def test_trials_of_a_bad_draft_become_rare() -> None:
    ran = run(12000, seeds=1, machine=SMALL, acceptance=always(0.0), batch=1)
    asked = ran.worlds[0].asked
    assert ran.speedup > 0.997
    assert 1 <= sum(map(bool, asked[8000:])) <= 12


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_a_draft_on_the_verge_costs_nothing(batch: int) -> None:
    """Pays in no length, or hardly, for all its acceptance of a third."""
    ran = run(800, machine=SMALL, acceptance=always(0.33), batch=batch)
    assert ran.speedup > 0.98


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_unmodelled_overhead_is_learned(batch: int) -> None:
    dear = replace(LARGE, overhead=20e-3)
    ran = run(800, machine=dear, acceptance=always(0.6), batch=batch)
    assert ran.speedup > 0.98


def test_a_text_that_must_be_caught_up_with_first() -> None:
    ran = run(800, machine=LARGE, acceptance=always(0.0), batch=4, catch_up=10e-3)
    assert ran.speedup > 0.985
    pays = run(800, machine=LARGE, acceptance=always(0.8), batch=4, catch_up=10e-3)
    assert pays.speedup > 1.5


# ---- it pays where it can ---------------------------------------------------------------------


@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("machine", list(MACHINES))
def test_a_good_draft_brings_what_it_can(machine: str, batch: int, acceptance: float) -> None:
    possible = best(MACHINES[machine], acceptance, batch)
    kind: dict[str, Any] = {"machine": MACHINES[machine], "acceptance": always(acceptance)}
    ran = run(2500 // batch + 700, **kind, batch=batch)
    if possible < 1.15:  # too little to be sure of soon; but nothing must be lost
        assert ran.speedup > 0.98
    else:
        assert ran.speedup > 0.95 * possible - 0.02 * (possible - 1.0)


@pytest.mark.parametrize(("batch", "least"), [(4, 1.9), (16, 1.8), (64, 1.4)])
def test_where_rows_are_padded_all_sequences_try_drafts_together(batch: int, least: float) -> None:
    """A recorded step computes as many rows for each sequence, and takes longer when it has other
    numbers of drafts than before: drafts for a few cost more than they bring, those for all pay."""

    def padded(sequences: int, nodes: int) -> int:
        return sequences << nodes.bit_length()

    ran = run(
        200,
        machine=replace(LOOKUP, step=1.2e-3, row=2e-6, overhead=0.8e-3),
        acceptance=always(0.8),
        batch=batch,
        length=1 << 16,
        passes=lambda nodes: 0,
        computed=padded,
        new_shape=1.5e-3,
    )
    assert ran.speedup > least


def test_beyond_the_ridge_only_as_many_rows_as_are_free() -> None:
    ran = run(600, machine=RIDGE, acceptance=always(0.9), batch=24)
    nodes = [asked for asked in ran.worlds[0].asked if asked]
    assert ran.speedup > 1.5
    assert sum(n <= 24 for n in nodes) > 0.9 * len(nodes)
    full = run(600, machine=RIDGE, acceptance=always(0.9), batch=64)
    assert full.speedup > 0.985


def test_a_sequence_that_copies_gets_long_drafts_and_others_none() -> None:
    ran = run(
        1500,
        machine=LOOKUP,
        acceptance=lambda s, t: 0.98 if odd(s, t) else 0.05,
        proposes=lambda s, t: 0.95 if odd(s, t) else 0.6,
        passes=lambda nodes: 0,
        batch=4,
        length=400,
    )
    fixed = SimulatedEngine(
        LOOKUP,
        lambda s, t: 0.98 if odd(s, t) else 0.05,
        4,
        proposes=lambda s, t: 0.95 if odd(s, t) else 0.6,
        passes=lambda nodes: 0,
        length=400,
    )
    plain = 4 / LOOKUP.seconds(4)
    assert ran.speedup > 1.02 * fixed.run(FixedDraftLength(4), 6000) / plain


def test_classes_of_requests_are_told_apart() -> None:
    ran = run(
        1000,
        machine=LARGE,
        acceptance=lambda s, t: 0.85 if odd(s, t) else 0.05,
        temperature=lambda handle: 0.0 if handle % 2 else 1.0,
        batch=8,
    )
    one = SimulatedEngine(LARGE, lambda s, t: 0.85 if odd(s, t) else 0.05, 8)
    together = max(one.run(FixedDraftLength(nodes), 3000) for nodes in (1, 2, 4))
    assert ran.speedup > together / (8 / LARGE.seconds(8))


# ---- it follows -------------------------------------------------------------------------------


def test_speculation_follows_changing_acceptance() -> None:
    world = SimulatedEngine(
        LARGE, lambda s, t: 0.8 if t < 300 or t >= 2500 else 0.0, 2, length=5000
    )
    control = controller(world)
    world.run(control, 40000)
    on = [asked > 0 for asked in world.asked]
    assert sum(on[50:300]) > 200
    assert sum(on[400:2500]) < 100  # tries, of some 0.1 steps each
    assert sum(on[4000:5000]) > 900
    predicted, measured = control.speedups()
    assert predicted == pytest.approx(measured, rel=0.15)
    assert measured == pytest.approx(best(LARGE, 0.8, 2), rel=0.1)


def test_changing_machine_speed_does_not_stop_speculation() -> None:
    drifting = replace(LARGE, speed=lambda step: 1.5 if step // 200 % 2 else 1.0)
    ran = run(2500, machine=drifting, acceptance=always(0.75), batch=2)
    assert ran.speedup > 0.9 * best(LARGE, 0.75, 2)


def test_wrong_curve_is_corrected() -> None:
    """Calibrated while the machine was three times as fast, and as if rows cost nothing."""
    world = SimulatedEngine(SMALL, always(0.3), 8, noise=0.05)
    control = controller(world, LatencyCurve([0.6e-3] * 256))
    ratio = world.run(control, 8 * 1500) / (8 / SMALL.seconds(8))
    assert ratio > 0.95  # clocks' outliers are in it, 2%


# ---- what it is asked -------------------------------------------------------------------------


def test_lengths_stay_within_the_remaining_tokens() -> None:
    world = SimulatedEngine(LARGE, always(0.95), 3, length=9)
    control = controller(world)

    class Checked(DraftLengthPolicy):
        def choose_lengths(self, decoding: Any, chunk: int) -> Any:
            counts = control.choose_lengths(decoding, chunk)
            assert len(counts) in (0, len(decoding))
            for count, s in zip(counts, decoding, strict=bool(counts)):
                assert 0 <= count <= min(MOST, max(0, s.request.length_limit - len(s.tokens) - 1))
            return counts

        def observe(self, outcome: StepOutcome) -> None:
            control.observe(outcome)

    world.run(Checked(), 3000)
    assert sum(map(bool, world.asked)) > 100


def test_prefill_chunk_beyond_the_ridge_shortens_drafts() -> None:
    """Below the ridge they are free; beyond it, where a chunk is, they are not."""
    world = SimulatedEngine(replace(RIDGE, draft_pass=1e-5), always(0.6), 4)
    control = controller(world)
    world.run(control, 4000)
    alone = sum(control.choose_lengths(world.running, 0))
    assert 0 < sum(control.choose_lengths(world.running, 512)) < 0.75 * alone
    assert sum(control.choose_lengths(world.running, 0)) >= alone


def test_no_lengths_without_decoding_sequences() -> None:
    control = controller(SimulatedEngine(LARGE, always(0.9), 1))
    assert list(control.choose_lengths([], 0)) == []
