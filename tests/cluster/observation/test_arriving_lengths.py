"""Lengths of outputs that begin, from those that have ended and from what others have passed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from cluster.observation.request_lengths import LengthHistogram, arriving_lengths
from cluster.observation.request_mix import RequestCounter, TrafficCounts, request_samples
from router.generation.metrics import TOKEN_BUCKETS, passed_edges

TURN_S = 5.0
TOKENS_S = 25.0
"""Of each output."""


def lognormal(rng: random.Random) -> int:
    return max(1, round(rng.lognormvariate(6.5, 1.0)))  # 1,100 tokens on average: 44 s


def count(
    rate: Callable[[float], float],
    begin_s: float,
    end_s: float,
    length: Callable[[random.Random], int] = lognormal,
    seed: int = 1,
) -> TrafficCounts:
    """Return what a router counts between two times; the service begins at 0. Each output grows at
    TOKENS_S."""
    rng, counter, at_s = random.Random(seed), RequestCounter(), 0.0
    while at_s < end_s:
        at_s += rng.expovariate(rate(at_s))
        output = length(rng)
        before, now = (
            min(output, max(0, round((time_s - at_s) * TOKENS_S))) for time_s in (begin_s, end_s)
        )
        if begin_s <= at_s < end_s:
            counter.arrived(500)
            counter.first_token(500, 0, 0.1)
        counter.grew(before, now)
        if before < output <= now:
            counter.ended(500, output, 1.0 / TOKENS_S)
    return counter.take(end_s - begin_s)


def mean_output(counted: TrafficCounts) -> float:
    return sum(s.output * s.weight for s in request_samples(counted))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_of_a_constant_load_the_lengths_are_those_that_ended(seed: int) -> None:
    counted = count(lambda _: 10.0, 600.0, 900.0, seed=seed)
    assert mean_output(counted) == pytest.approx(counted.outputs.mean, rel=0.1)
    assert mean_output(counted) == pytest.approx(1097.0, rel=0.1)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_after_a_start_the_outputs_that_still_run_are_known_to_be_longer(seed: int) -> None:
    counted = count(lambda _: 50.0, 0.0, 60.0, seed=seed)
    assert counted.outputs.mean < 500.0
    assert 700.0 < mean_output(counted) < 900.0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_growth_of_the_load_makes_outputs_no_shorter(seed: int) -> None:
    counted = count(lambda at_s: 20.0 if at_s < 300.0 else 80.0, 300.0, 360.0, seed=seed)
    assert counted.outputs.mean < 0.8 * 1097.0
    assert mean_output(counted) == pytest.approx(1097.0, rel=0.15)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_decline_of_the_load_makes_outputs_no_longer(seed: int) -> None:
    counted = count(lambda at_s: 80.0 if at_s < 300.0 else 20.0, 300.0, 360.0, seed=seed)
    assert counted.outputs.mean > 1.2 * 1097.0
    assert mean_output(counted) == pytest.approx(1097.0, rel=0.15)


def test_outputs_of_one_length() -> None:
    counted = count(lambda _: 10.0, 300.0, 400.0, lambda _: 400)
    assert mean_output(counted) == pytest.approx(400.0)


def test_nothing_is_taken_to_be_longer_than_what_has_been_seen() -> None:
    ended = LengthHistogram(counts=(0, 0, 1.0, *(0,) * 25), total=30.0)
    passed = LengthHistogram(counts=(4.0, 4.0, 3.0, *(0,) * 25), total=1.0)
    found = arriving_lengths(ended, passed)
    assert found.counts == (0, 0, 0.25, 0.75, *(0,) * 24)
    assert found.count == 1.0 and 30.0 < found.mean <= TOKEN_BUCKETS[3]


def test_a_bucket_that_none_has_left_is_passed_over() -> None:
    ended = LengthHistogram(counts=(1.0, 0, 0, 1.0, *(0,) * 24), total=60.0)
    passed = LengthHistogram(counts=(1.0, 0, 1.0, *(0,) * 25), total=48.0)
    assert arriving_lengths(ended, passed).counts == (1.0, 0, 0, 1.0, *(0,) * 24)


def test_without_what_was_passed_lengths_are_those_that_ended() -> None:
    ended = LengthHistogram(counts=(3.0, 2.0, *(0,) * 26), total=80.0)
    assert arriving_lengths(ended, LengthHistogram()) == ended
    other = LengthHistogram((10.0,), (5.0, 0.0), 50.0)  # of a router of another version
    assert arriving_lengths(ended, other) == ended
    assert arriving_lengths(LengthHistogram(), ended) == LengthHistogram()


def test_a_length_at_an_edge_has_not_passed_it() -> None:
    assert passed_edges(0, 16) == ()
    assert passed_edges(16, 17) == (16.0,)
    assert passed_edges(0, 33) == (16.0, 23.0, 32.0)
    assert passed_edges(17, 23) == ()
    assert passed_edges(200_000, 300_000) == ()
