"""Dispersions and waits of arrivals that are generated from known processes."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import pairwise
from random import Random

import numpy as np
import pytest

from cluster.sizing.burstiness import (
    MIN_COUNTS,
    ArrivalRates,
    arrival_dispersion,
    burst_waits,
    burstiness,
    dispersion,
    usual_bursts,
)
from cluster.sizing.snapshot import Arrivals

INTERVAL_S = 5.0
HOUR = 720
SIZES = (1, 2, 4, 8, 16)


def poisson_times(rng: Random, seconds: float, rate: Callable[[float], float]) -> list[float]:
    """Return the times of arrivals at a rate that is constant for a second."""
    found, most = [], max(rate(at) for at in range(int(seconds)))
    now = rng.expovariate(most)
    while now < seconds:
        if rng.random() * most < rate(int(now)):
            found.append(now)
        now += rng.expovariate(most)
    return found


def in_bursts(rng: Random, seconds: int) -> Callable[[float], float]:
    """Return a rate of 10/s on average: bursts of 8 s on average with 40/s, and 2.5/s between."""
    rates, rate = [], 2.5
    for _ in range(seconds):
        if rng.random() < (1 / 32 if rate < 10 else 1 / 8):
            rate = 42.5 - rate
        rates.append(rate)
    return lambda at: rates[int(at)]


def counted(times: list[float], seconds: float = HOUR * INTERVAL_S) -> Arrivals:
    edges = np.arange(0.0, seconds + INTERVAL_S, INTERVAL_S)
    return Arrivals(INTERVAL_S, tuple(np.histogram(times, edges)[0].tolist()))


def rates(arrivals: Arrivals) -> ArrivalRates:
    return ArrivalRates(INTERVAL_S, np.array(arrivals.counts) / INTERVAL_S)


def dispersions(arrivals: Arrivals) -> list[float]:
    return [arrival_dispersion(arrivals, size) for size in SIZES]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_requests_one_by_one_have_a_dispersion_of_one(seed: int) -> None:
    found = dispersions(counted(poisson_times(Random(seed), 3600, lambda _: 4.0)))
    assert max(found) < 1.5


def test_bursts_disperse_counts() -> None:
    """The rate has a variance of 225 and forgets its past in 6.4 s, so that counts of 5, 20 and
    80 s have dispersions of 90, 202 and 266. What differs between more than 80 s is not counted,
    which leaves 89, 199 and 255; nor is the largest difference, which is a fifth of those of 80 s
    in an hour."""
    found = []
    for seed in range(12):
        rng = Random(seed)
        arrivals = counted(poisson_times(rng, 3600, in_bursts(rng, 3600)))
        found.append([arrival_dispersion(arrivals, size) for size in (1, 4, 16)])
    assert np.mean(found, axis=0) == pytest.approx([89, 199, 0.8 * 255], rel=0.15)


def test_chance_is_no_burstiness() -> None:
    rng = Random(5)
    alone = counted(poisson_times(rng, 900, lambda _: 4.0))
    assert [burstiness(alone, seconds) for seconds in (5.0, 20.0, 80.0)] == pytest.approx(
        [0.0] * 3, abs=1.0
    )
    together = counted(poisson_times(rng, 3600, in_bursts(rng, 3600)))
    assert burstiness(together, 20.0) == pytest.approx(200, rel=0.3)
    assert burstiness(Arrivals(), 20.0) == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_burstiness_of_five_minutes_does_not_jump_with_the_time_that_is_asked_for(
    seed: int,
) -> None:
    rng = Random(seed)
    short = counted(poisson_times(rng, 300, in_bursts(rng, 300)), seconds=300.0)
    found = [burstiness(short, seconds) for seconds in np.arange(5.0, 40.0, 0.5)]
    largest = max(abs(after - before) for before, after in pairwise(found))
    assert largest <= 0.1 * max(found)


def test_neither_a_step_nor_a_trend_is_a_burst() -> None:
    step = poisson_times(Random(1), 3600, lambda at: 4.0 if at < 2000 else 16.0)
    trend = poisson_times(Random(1), 3600, lambda at: 4.0 + at / 600)
    assert max(dispersions(counted(step))) < 2.0  # 45 counts of 80 s deviate by 0.2
    assert max(dispersions(counted(trend))) < 2.0


def test_too_little_is_no_burst() -> None:
    counts = (0.0, 90.0) * (MIN_COUNTS // 2)
    assert arrival_dispersion(Arrivals(INTERVAL_S, counts[1:]), 1) == 1.0
    assert arrival_dispersion(Arrivals(INTERVAL_S, counts), 1) == pytest.approx(90.0)
    assert arrival_dispersion(Arrivals(INTERVAL_S, counts), 2) == 1.0
    assert dispersion([], least=2.5) == 2.5


@pytest.mark.parametrize("servers", [10, 12, 14, 17, 20])
@pytest.mark.parametrize("seed", [1, 2])
def test_waits_are_those_of_a_simulated_queue(servers: int, seed: int) -> None:
    """Prompts of 0.5 s, one by one to the worker that is free first."""
    rng = Random(seed)
    times = poisson_times(rng, 3600, in_bursts(rng, 3600))
    free, waits = [0.0] * servers, []
    for at in times:
        start = max(at, heapq.heappop(free))
        heapq.heappush(free, start + 0.5)
        waits.append(start - at)
    patience_s = np.array([1.0, 3.0, 8.0, 20.0])
    found = burst_waits(servers, 0.5, patience_s, rates(counted(times)))
    seen = [sum(wait > most for wait in waits) / len(waits) for most in patience_s]
    assert found == pytest.approx(seen, abs=0.07)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_long_prompt_does_not_wait_for_its_own_work(seed: int) -> None:
    """One of 25 s comes every 100 s, and two workers compute them: hardly one waits for 2.5 s."""
    alone = rates(counted(poisson_times(Random(seed), 3600.0, lambda at: 0.01)))
    assert float(burst_waits(2, 25.0, np.array([2.5]), alone)[0]) <= 0.1


def test_bursts_of_another_load_are_scaled_to_the_present_one() -> None:
    """Earlier there were four times as many users, whose bursts are twice as large together."""
    before = [10.0 + 20.0 * (n % 8 == 0) for n in range(600)]  # a mean of 12.5
    now = [3.125] * 600
    found = usual_bursts(Arrivals(1.0, (*before, *now)), 3.125)
    assert found.rates.mean() == pytest.approx(3.125)
    assert found.rates[800:] == pytest.approx(3.125, rel=0.1)
    assert found.rates[:400].mean() == pytest.approx(3.125, rel=0.1)
    assert found.rates[:400].max() == pytest.approx(3.125 + 17.5 / 2, rel=0.1)


def test_more_servers_never_wait_longer() -> None:
    rng = Random(1)
    arrivals = rates(counted(poisson_times(rng, 3600, in_bursts(rng, 3600))))
    shares = [float(burst_waits(n, 0.5, np.array([3.0]), arrivals)[0]) for n in range(1, 40)]
    assert all(more <= fewer for fewer, more in pairwise(shares))
    assert shares[0] > 0.9 and shares[-1] == 0.0


@pytest.mark.parametrize("counts", [(), (0.0,) * 100])
def test_where_nothing_arrives_nothing_waits(counts: tuple[float, ...]) -> None:
    bursts = usual_bursts(Arrivals(INTERVAL_S, counts), 1.0)
    assert burst_waits(2, 0.5, np.array([0.0, 3.0]), bursts).tolist() == [0.0, 0.0]
    assert burst_waits(0, 0.5, np.array([0.0]), rates(Arrivals(5.0, (9.0,)))).tolist() == [0.0]
