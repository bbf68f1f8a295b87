"""Windows over what was counted."""

from __future__ import annotations

import random
import statistics

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
        counter.ended(prompt, output, 0.02)
    return counter.take(seconds)


def mix(sliding: SlidingWindow) -> RequestMix:
    found = sliding.mix()
    assert found is not None
    return found


def prompt(sliding: SlidingWindow) -> float:
    return sum(s.uncached * s.weight for s in mix(sliding).samples)


def output(sliding: SlidingWindow) -> float:
    return sum(s.output * s.weight for s in mix(sliding).samples)


def test_as_many_requests_as_their_variance_asks_for() -> None:
    """Lengths of one kind have k = 0: 400 requests suffice. Every fourth one is 13 times as long as
    the others: k = 1.7, so that 1,080 are needed."""
    alike, mixed = SlidingWindow(60.0, 15.0), SlidingWindow(60.0, 15.0)
    for _ in range(60):
        alike.add(counted(20))
        long = counted(5, prompt=1300)
        mixed.add(TrafficCounts.together([counted(15, seconds=0.0), long]))
    assert (mix(alike).window_s, mix(alike).rate) == pytest.approx((105, 4))
    assert mix(mixed).window_s == pytest.approx(1080 / 4, abs=20)


def test_a_window_is_no_longer_or_shorter_than_allowed() -> None:
    busy, quiet = SlidingWindow(60.0, 15.0), SlidingWindow(60.0, 15.0)
    for _ in range(70):
        busy.add(counted(1000))
        quiet.add(counted(1))
    assert (mix(busy).window_s, mix(quiet).window_s) == pytest.approx((15, 295))


def test_batches_of_requests_need_a_longer_window() -> None:
    single, batches = SlidingWindow(60.0, 15.0), SlidingWindow(60.0, 15.0)
    for i in range(60):
        single.add(counted(20))
        batches.add(counted(40 if i % 2 else 0))
    assert mix(batches).window_s > 2 * mix(single).window_s


def test_nothing_before_the_first_window_is_full() -> None:
    """A busy cluster has enough requests after the short window, another one waits for window_s."""
    busy, quiet = SlidingWindow(60.0, 15.0), SlidingWindow(60.0, 15.0)
    begun = []
    for sliding, requests in ((busy, 1000), (quiet, 1)):
        turns = 0
        while sliding.mix() is None:
            sliding.add(counted(requests))
            turns += 1
        begun.append(5 * turns)
    assert begun == [15, 60]


def test_a_gap_is_not_seen() -> None:
    sliding = SlidingWindow(60.0, 15.0)
    for _ in range(20):
        sliding.add(counted(1000))
    sliding.add(counted(80_000, seconds=400.0))
    assert sliding.mix() is None
    for _ in range(3):
        sliding.add(counted(10))
    assert sliding.mix() is None
    for _ in range(9):
        sliding.add(counted(10))
    assert mix(sliding).rate == pytest.approx(2)


def test_looks_that_are_a_little_late_make_no_longer_window() -> None:
    sliding = SlidingWindow(60.0, 15.0)
    for _ in range(30):
        sliding.add(counted(2000, seconds=4.99))
    assert mix(sliding).window_s == pytest.approx(3 * 4.99)


@pytest.mark.parametrize("after", [2000, 125])
def test_what_was_before_a_change_is_not_used(after: int) -> None:
    sliding = SlidingWindow(60.0, 15.0)
    for of in [counted(40, prompt=500)] * 40 + [counted(40, prompt=after)] * 3:
        sliding.add(of)
    assert prompt(sliding) == pytest.approx(after)
    assert mix(sliding).window_s == pytest.approx(15)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_constant_load_has_no_change(seed: int) -> None:
    """Poisson arrivals of 5 requests/s with k = 1: two changes that are none would shorten the
    windows to 15 s."""
    rng, sliding = random.Random(seed), SlidingWindow(60.0, 15.0)
    seen, lengths = [], []
    at_s = rng.expovariate(5.0)
    for turn in range(600):
        counter = RequestCounter()
        while at_s < 5.0 * (turn + 1):
            at_s += rng.expovariate(5.0)
            counter.arrived(length := max(1, round(rng.expovariate(1 / 500))))
            counter.first_token(length, 0, 0.3)
            counter.ended(length, max(1, round(rng.expovariate(1 / 500))), 0.02)
        sliding.add(counter.take(5.0))
        if turn > 100:
            lengths.append(mix(sliding).window_s)
            seen.append(mix(sliding).rate * prompt(sliding))
    assert statistics.stdev(seen) < 0.06 * statistics.fmean(seen)
    assert min(lengths) > 120


def test_few_requests_are_looked_at_for_longer() -> None:
    sliding = SlidingWindow(60.0, 15.0)
    for of in [counted(3, prompt=100)] * 20 + [counted(0)] * 11 + [counted(1, prompt=700)]:
        sliding.add(of)
    assert mix(sliding).rate < 0.1
    assert 100 < prompt(sliding) < 200


def test_nobody_asks_and_what_they_asked_is_known_still() -> None:
    sliding = SlidingWindow(60.0, 15.0)
    for of in [counted(5)] + [counted(0)] * 300:
        sliding.add(of)
    assert mix(sliding).rate == 0
    assert (prompt(sliding), output(sliding)) == pytest.approx((100, 50))
    assert sliding.observed().ttft_s is None


def test_what_clients_saw_is_of_the_requests_of_the_mix() -> None:
    sliding = SlidingWindow(60.0, 15.0)
    for _ in range(3):
        sliding.add(counted(500))
    arriving = RequestCounter()
    for _ in range(500):
        arriving.arrived(700)  # they are still queued
    sliding.add(TrafficCounts.together([arriving.take(5.0), counted(500, seconds=0.0)]))
    observed = sliding.observed()
    assert (observed.ttft_s, observed.tpot_s) == pytest.approx((0.3, 0.02))
    assert observed.prompt_tokens == pytest.approx(100)
    assert prompt(sliding) > 150


def test_workers_add_what_only_they_know() -> None:
    sliding = SlidingWindow(60.0, 15.0)
    for _ in range(12):
        sliding.add(counted(5))
    found = sliding.mix(residents=2.0, backlog_tokens=900.0)
    assert found is not None
    assert (found.residents, found.backlog_tokens) == (2.0, 900.0)


def test_a_few_long_prompts_are_no_change_of_the_load() -> None:
    """Three in 15 s instead of one in 100 s on average: 6 standard deviations, as is common of so
    few. Sixty times as many prompts that are as short as the others are a change."""
    for long, window_s in ((3, 295), (0, 15)):
        sliding = SlidingWindow(60.0, 15.0)
        for number in range(80):
            some = [counted(10, seconds=0.0)]
            some += [counted(1, prompt=10_000, seconds=0.0)] if number % 20 == 0 else []
            sliding.add(TrafficCounts.together([*some, counted(0)]))
        for _ in range(3):
            more = counted(long // 3, prompt=10_000) if long else counted(200)
            sliding.add(TrafficCounts.together([counted(10, seconds=0.0), more]))
        assert mix(sliding).window_s == pytest.approx(window_s, abs=20)


def test_bursts_that_are_usual_are_no_change_of_the_load() -> None:
    """Every minute brings a burst of 15 s with five times the rate. The first ones look like
    changes; later ones do not shorten the window."""
    sliding, shortened = SlidingWindow(60.0, 15.0), []
    for minute in range(30):
        for turn in range(12):
            sliding.add(counted(100 if turn < 3 else 20))
            shortened += [minute] * (minute > 0 and mix(sliding).window_s < 60.0)
    assert max(shortened, default=0) < 10
    assert mix(sliding).rate == pytest.approx(8.0, rel=0.05)


def test_arrivals_of_an_hour_are_remembered_and_those_before_a_gap_are_not() -> None:
    sliding = SlidingWindow(60.0, 15.0)
    for n in range(900):
        sliding.add(counted(n % 5))
    seen = mix(sliding).arrivals
    assert (seen.interval_s, len(seen.counts)) == (pytest.approx(5.0), 720)
    assert seen.counts[-5:] == (0, 1, 2, 3, 4)
    sliding.add(counted(10, seconds=400.0))
    for _ in range(12):
        sliding.add(counted(7))
    assert mix(sliding).arrivals.counts == (7,) * 12
