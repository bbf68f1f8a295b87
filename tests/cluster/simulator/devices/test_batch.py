"""Steps in closed form against steps one by one."""

from __future__ import annotations

from random import Random

import pytest

from cluster.simulator.devices.batch import DraftPace, SimulatedBatch
from cluster.simulator.devices.request import SimulatedRequest
from protocol.performance.speculation_profile import SpeculationProfile, decode_pace
from protocol.performance.step_model import StepModel

MODEL = StepModel(0.008, 1e-4, 1e-6, 0.0, 0.0)
PROFILE = SpeculationProfile(accept=(0.8, 0.7, 0.6), per_pass_s=1e-3, row_s=2e-4)


def job(number: int = 0) -> SimulatedRequest:
    return SimulatedRequest(number, 0.0, 100, 10)


def run_to_end(batch: SimulatedBatch) -> dict[SimulatedRequest, float]:
    """When each leaves."""
    left = {}
    while (at := batch.next_end()) is not None:
        batch.settle(at)
        assert batch.at == pytest.approx(at)
        left.update(dict.fromkeys(batch.pop_finished(), batch.at))
    return left


def test_a_sequence_alone_takes_the_sum_of_its_steps() -> None:
    batch = SimulatedBatch(MODEL)
    one = job()
    batch.join(one, 100, 50)
    steps = sum(MODEL.decode_s(1, 100 + k) for k in range(50))
    assert run_to_end(batch) == {one: pytest.approx(steps)}
    assert batch.kv == 0.0 and batch.busy_s == pytest.approx(steps)


@pytest.mark.parametrize("profile", [None, PROFILE])
def test_joins_leaves_and_ends_are_those_of_steps_made_one_by_one(
    profile: SpeculationProfile | None,
) -> None:
    """The same arrivals and departures against a loop over steps."""
    draw = Random(3)
    joins = sorted(
        (draw.uniform(0, 2), draw.randint(50, 500), draw.randint(1, 80)) for _ in range(40)
    )
    jobs = [job(i) for i in range(len(joins))]
    drafts = DraftPace(MODEL, profile)
    fast = SimulatedBatch(MODEL, drafts)
    left: dict[SimulatedRequest, float] = {}
    for one, (at, context, tokens) in zip(jobs, joins, strict=True):
        while (end := fast.next_end()) is not None and end < at:
            fast.settle(end)
            left.update(dict.fromkeys(fast.pop_finished(), fast.at))
        fast.settle(at)
        left.update(dict.fromkeys(fast.pop_finished(), fast.at))
        fast.join(one, context, tokens)
    left |= run_to_end(fast)
    assert left == {k: pytest.approx(v) for k, v in _slowly(jobs, joins, drafts).items()}


def _slowly(
    jobs: list[SimulatedRequest], joins: list[tuple[float, int, int]], drafts: DraftPace
) -> dict[SimulatedRequest, float]:
    now, left, chosen_for = 0.0, {}, -1
    waiting = list(zip(jobs, joins, strict=True))
    inside: dict[SimulatedRequest, tuple[float, float]] = {}  # KV, tokens left
    while waiting or inside:
        if not inside:
            now = max(now, waiting[0][1][0])
        while waiting and waiting[0][1][0] <= now + 1e-12:
            one, (_, context, tokens) = waiting.pop(0)
            inside[one] = float(context), float(tokens)
        kv_tokens = sum(kv for kv, _ in inside.values())
        if chosen_for != hash(frozenset(inside)):
            chosen_for, pace = hash(frozenset(inside)), drafts.of(len(inside), kv_tokens)
        now += MODEL.decode_s(len(inside), kv_tokens) + pace[1]
        inside = {k: (kv + pace[0], tokens - pace[0]) for k, (kv, tokens) in inside.items()}
        for one in [k for k, (_, tokens) in inside.items() if tokens <= 1e-9]:
            left[one] = now
            del inside[one]
    return left


def test_the_pace_falls_with_the_batch_and_is_that_of_the_model() -> None:
    drafts = DraftPace(MODEL, PROFILE)
    tokens = [drafts.of(rows, 100.0 * rows)[0] for rows in (1, 8, 64)]
    assert tokens[0] > tokens[1] > tokens[2] >= 1.0
    for rows in (1, 8, 64):
        pace = decode_pace(MODEL, PROFILE, rows, 100.0 * rows)
        tokens_each, drafting_s = drafts.of(rows, 100.0 * rows)
        seconds = MODEL.decode_s(rows, 100.0 * rows) + drafting_s
        assert seconds / tokens_each == pytest.approx(pace.tpot_s, rel=1e-3)


def test_who_leaves_early_takes_its_kv_along_and_says_what_it_had() -> None:
    batch = SimulatedBatch(MODEL)
    one, other = job(1), job(2)
    batch.join(one, 100, 50)
    batch.join(other, 200, 50)
    batch.settle(batch.seconds(10) - 1e-6)
    assert batch.leave(one) == 10
    assert batch.kv == 210 and batch.rows == 1 and batch.requests == [other]


def test_a_moment_at_a_boundary_is_that_boundary() -> None:
    batch = SimulatedBatch(StepModel(0.01, 0.0, 0.0, 0.0, 0.0))
    batch.join(job(), 1, 100)
    batch.settle(0.07)
    assert batch.tokens == 7 and batch.at == pytest.approx(0.07)
    batch.settle(0.0701)
    assert batch.tokens == 8
