"""Windows over what was counted."""

from __future__ import annotations

import pytest

from cluster.observation.request_mix import RequestCounter, TrafficCounts
from cluster.observation.sliding_window import SlidingWindow
from cluster.sizing.snapshot import RequestMix


def counted(
    requests: int, prompt: int = 100, output: int = 50, seconds: float = 5.0
) -> TrafficCounts:
    counter = RequestCounter()
    for _ in range(requests):
        counter.arrived(prompt)
        counter.first_token(prompt, 0, 0.3)
        counter.ended(output, 0.02)
    return counter.take(seconds)


def mix(sliding: SlidingWindow) -> RequestMix:
    found = sliding.mix()
    assert found is not None
    return found


def prompt(sliding: SlidingWindow) -> float:
    return sum(s.uncached * s.weight for s in mix(sliding).samples)


def output(sliding: SlidingWindow) -> float:
    return sum(s.output * s.weight for s in mix(sliding).samples)


def test_rates_of_the_window_and_of_a_burst() -> None:
    sliding = SlidingWindow(60.0, 15.0)
    assert sliding.mix() is None
    for requests in [1] * 20 + [10] * 3:
        sliding.add(counted(requests))
    found = mix(sliding)
    assert (found.window_s, found.rate) == pytest.approx((60, 39 / 60))
    assert (found.burst_s, found.burst_rate) == pytest.approx((15, 2))


def test_a_window_that_has_just_begun() -> None:
    sliding = SlidingWindow(60.0, 15.0)
    sliding.add(counted(10))
    assert (mix(sliding).window_s, mix(sliding).rate) == (5.0, 2.0)


def test_looks_that_are_a_little_late_make_no_longer_window() -> None:
    sliding = SlidingWindow(60.0, 15.0)
    for _ in range(30):
        sliding.add(counted(1, seconds=4.99))
    assert mix(sliding).window_s == pytest.approx(12 * 4.99)
    assert mix(sliding).burst_s == pytest.approx(3 * 4.99)


def test_a_busy_cluster_sees_at_once_that_others_come() -> None:
    sliding = SlidingWindow(60.0, 15.0)
    for of in [counted(500, prompt=100)] * 20 + [counted(500, prompt=2000)] * 3:
        sliding.add(of)
    assert prompt(sliding) == pytest.approx(2000)


def test_few_requests_are_looked_at_for_longer() -> None:
    sliding = SlidingWindow(60.0, 15.0)
    for of in [counted(3, prompt=100)] * 20 + [counted(0)] * 11 + [counted(1, prompt=700)]:
        sliding.add(of)
    assert mix(sliding).rate == pytest.approx(1 / 60)
    assert 100 < prompt(sliding) < 200


def test_nobody_asks_and_what_they_asked_is_known_still() -> None:
    sliding = SlidingWindow(60.0, 15.0)
    for of in [counted(5)] + [counted(0)] * 300:
        sliding.add(of)
    assert mix(sliding).rate == 0
    assert (prompt(sliding), output(sliding)) == pytest.approx((100, 50))
    assert sliding.observed().ttft_s is None


def test_what_clients_saw() -> None:
    sliding = SlidingWindow(60.0, 15.0)
    sliding.add(counted(5))
    observed = sliding.observed()
    assert (observed.ttft_s, observed.tpot_s) == pytest.approx((0.3, 0.02))


def test_workers_add_what_only_they_know() -> None:
    sliding = SlidingWindow(60.0, 15.0)
    sliding.add(counted(5))
    found = sliding.mix(pace=2.0, backlog_tokens=900.0)
    assert found is not None
    assert (found.pace, found.backlog_tokens) == (2.0, 900.0)
