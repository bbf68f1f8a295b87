"""The policy under a constant load, by requests that arrive at random."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from cluster.observation.request_mix import RequestCounter, TrafficCounts
from cluster.observation.sliding_window import SlidingWindow
from cluster.sizing.decision import ScalingDecision
from cluster.sizing.policy import decide
from tests.cluster.sizing.worlds import after, snapshot

TURN_S = 5.0


def poisson_traffic(rate: float, seed: int) -> Iterator[TrafficCounts]:
    """Yield the counts of one turn after another; lengths are exponential (k = 1)."""
    rng, at_s, ends_s = random.Random(seed), 0.0, 0.0
    while True:
        counter, ends_s = RequestCounter(), ends_s + TURN_S
        while at_s < ends_s:
            at_s += rng.expovariate(rate)
            prompt, output = (max(1, round(rng.expovariate(1 / n))) for n in (500, 100))
            counter.arrived(prompt)
            counter.first_token(prompt, 0, 0.1)
            counter.ended(prompt, output, 0.02)
        yield counter.take(TURN_S)


def decisions(rate: float, seed: int, turns: int) -> list[ScalingDecision]:
    sliding, state, made = SlidingWindow(60.0, 15.0), snapshot(1, 1, None), []
    for _, counted in zip(range(turns), poisson_traffic(rate, seed), strict=False):
        sliding.add(counted)
        made.append(decide(replace(state, mix=sliding.mix())))
        state = after(state, made[-1], TURN_S)
    return made


@pytest.mark.parametrize("rate", [8.0, 30.0, 60.0])
def test_no_oscillation_at_constant_load(rate: float) -> None:
    """Half an hour: after the first minutes, which learn the growth, the pools stay within one
    worker or a tenth of their mean, and at most two workers are stopped and started again."""
    made = decisions(rate, seed=1, turns=360)[72:]
    for role in ("prefill", "decode"):
        sizes = [one.targets.of(role) for one in made]
        mean = sum(sizes) / len(sizes)
        assert max(sizes) - mean <= max(1.0, 0.1 * mean), role
        assert mean - min(sizes) <= max(1.0, 0.1 * mean), role
        changes = sum(abs(b - a) for a, b in itertools.pairwise(sizes))
        assert changes <= 4, role
    assert not any(one.loans for one in made)


@pytest.mark.parametrize("seed", [3, 4])
def test_a_worker_that_is_needed_now_and_then_is_stopped_less_and_less(seed: int) -> None:
    """A second decode worker is wanted for a fifth of the time, at random. After half an hour of
    stops and starts, it is stopped once at most in an hour and a half."""
    made = decisions(30.0, seed, turns=1440)
    wanted = [one.decode is not None and one.decode.workers > 1 for one in made]
    assert 0.1 < sum(wanted) / len(wanted) < 0.4
    sizes = [one.targets.decode for one in made[360:]]
    assert sum(abs(b - a) for a, b in itertools.pairwise(sizes)) <= 2
