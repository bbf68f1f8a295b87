"""Against closed forms and a simulated queue."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from random import Random

import pytest

from cluster.sizing.demand import prefill_workers
from cluster.sizing.queueing import (
    PrefillOutlook,
    erlang_c,
    late_share,
    least_number,
    mean_wait_s,
    service_time,
)

ONE_S = service_time([1.0], [1.0])
TWO_KINDS = service_time([0.5, 2.5], [3.0, 1.0])  # mean 1, spread 0.75


def test_statistics_of_two_kinds() -> None:
    assert [TWO_KINDS.mean_s, TWO_KINDS.spread] == pytest.approx([1.0, 0.75])
    assert [TWO_KINDS.quantile_s(share) for share in (0.75, 0.76, 1.0)] == [0.5, 2.5, 2.5]
    assert service_time([1.0], [0.0]).mean_s == 0.0


def test_one_server_waits_as_often_as_it_is_busy() -> None:
    assert erlang_c(1, 0.7) == pytest.approx(0.7)  # M/M/1: P(wait) = rho


def test_a_table_value() -> None:
    # a = 8 erlangs on 10 servers: C = (a^c/c!)(c/(c-a)) / (sum a^k/k! + the same)
    top = 8**10 / math.factorial(10) * 10 / 2
    assert erlang_c(10, 8.0) == pytest.approx(
        top / (sum(8**k / math.factorial(k) for k in range(10)) + top)
    )


def test_many_servers_do_not_overflow() -> None:
    assert 0 < erlang_c(5000, 4900.0) < 1


@pytest.mark.parametrize(("servers", "load"), [(1, 1.0), (3, 4.5)])
def test_an_overloaded_queue_has_no_end(servers: int, load: float) -> None:
    assert erlang_c(servers, load) == 1.0
    assert mean_wait_s(servers, load, ONE_S) == math.inf
    assert late_share(servers, PrefillOutlook(load), ONE_S, 10.0) == 1.0


def test_no_load_waits_for_nothing() -> None:
    assert erlang_c(3, 0.0) == mean_wait_s(3, 0.0, ONE_S) == 0.0
    assert late_share(3, PrefillOutlook(0.0), ONE_S, 9.0) == 0.0


@pytest.mark.parametrize("name", ["constant", "two kinds"])
def test_late_prompts_of_a_simulated_queue(name: str) -> None:
    """Four servers at 80%: mean wait and late prompts, the slow ones with less patience."""
    kinds = ONE_S if name == "constant" else TWO_KINDS
    chance, servers, load, ttft_s = Random(7), 4, 3.2, 3.0
    free = [0.0] * servers
    now, waits, late = 0.0, 0.0, 0
    seconds = chance.choices(kinds.seconds.tolist(), kinds.weights.tolist(), k=60_000)
    for service_s in seconds:
        now += chance.expovariate(load)
        start = max(now, heapq.heappop(free))
        heapq.heappush(free, start + service_s)
        waits += start - now
        late += start - now + service_s > ttft_s
    assert waits / len(seconds) == pytest.approx(mean_wait_s(servers, load, kinds), rel=0.12)
    told = late_share(servers, PrefillOutlook(load), kinds, ttft_s)
    assert late / len(seconds) == pytest.approx(told, abs=0.03)


@pytest.mark.parametrize("load", [0.2, 0.35, 0.5, 0.7])
def test_late_prompts_of_a_worker_that_is_often_idle(load: float) -> None:
    """Prompts of 1 s may wait for as long again: few wait, but those that do wait for long."""
    chance, free, now, late, prompts = Random(7), 0.0, 0.0, 0, 60_000
    for _ in range(prompts):
        now += chance.expovariate(load)
        late += free - now > 1.0
        free = max(now, free) + 1.0
    told = late_share(1, PrefillOutlook(load), ONE_S, 2.0)
    assert late / prompts == pytest.approx(told, abs=0.03)


@pytest.mark.parametrize(
    ("servers", "growth", "queued_s"),
    [
        (9, 0.0, 0.0),
        (11, 0.0, 0.0),
        (11, 0.4, 0.0),
        (12, 0.0, 40.0),
        (11, 0.0, 60.0),
        (12, 0.4, 40.0),
    ],
)
def test_late_prompts_of_a_pool_that_waits_for_workers(
    servers: int, growth: float, queued_s: float
) -> None:
    """10 prompts of 1 s arrive in each second, and more with time; some wait at the beginning.
    Those that arrive after 60 s, when more workers serve, wait for longer than 5 s as often as in
    1,500 simulated queues."""
    rng, late, prompts = Random(3), 0, 0
    for _ in range(1500):
        free = sorted(rng.random() + queued_s / servers for _ in range(servers))
        now = 0.0
        while now < 60.0:
            now += rng.expovariate(10.0 * (1.0 + growth * now / 60.0))
            start = max(now, heapq.heappop(free))
            heapq.heappush(free, start + 1.0)
        late, prompts = late + (start - now > 5.0), prompts + 1
    outlook = PrefillOutlook(10.0, seconds=60.0, growth=((growth, 1.0),), queued_s=queued_s)
    assert late_share(servers, outlook, ONE_S, 6.0) == pytest.approx(late / prompts, abs=0.06)


@pytest.mark.parametrize("seconds", [60.0, 300.0])
def test_more_growth_is_no_less_late_and_never_suddenly_more(seconds: float) -> None:
    """Also where the load comes to exceed the servers: 9.5 erlangs, ten servers."""
    growths = [i / 1000 for i in range(1000)]
    late = [
        late_share(10, PrefillOutlook(9.5, seconds, growth=((growth, 1.0),)), TWO_KINDS, 4.0)
        for growth in growths
    ]
    steps = [more - less for less, more in itertools.pairwise(late)]
    assert min(steps) > -1e-9 and max(steps) < 0.02


def test_a_queue_of_nothing_makes_nobody_late() -> None:
    none, little = (
        late_share(2, PrefillOutlook(1.0, 5.0, queued_s=queued_s), ONE_S, 1.05)
        for queued_s in (0.0, 1e-6)
    )
    assert little == pytest.approx(none, abs=1e-3)


def test_an_uncertain_load_is_late_more_often_than_its_mean() -> None:
    known, guessed = (
        late_share(13, PrefillOutlook(10.0, error=error), ONE_S, 6.0) for error in (0.0, 0.2)
    )
    assert known < 0.01
    assert guessed == pytest.approx(1 / 6, abs=0.01)  # 13.5 erlangs in one of three cases


def test_the_least_number_is_the_least() -> None:
    def late(servers: int) -> float:
        return late_share(servers, PrefillOutlook(6.3), TWO_KINDS, 3.0)

    workers = prefill_workers(PrefillOutlook(6.3), TWO_KINDS, 3.0)
    assert late(workers) <= 0.1 < late(workers - 1)
    for least in (3, 4, 5, 77, 1000):
        assert least_number(lambda n, least=least: n >= least, 3) == least  # type: ignore[misc]


@pytest.mark.parametrize("load", [20_000.0, 1e9])
def test_a_load_beyond_all_limits_takes_no_longer(load: float) -> None:
    """A step for each server at most, however impatient; nothing where no limit reaches."""
    began = time.thread_time()
    outlook = PrefillOutlook(load, seconds=60.0, growth=((0.1, 1.0),))
    assert prefill_workers(outlook, ONE_S, 1.0) > load
    assert time.thread_time() - began < 0.5
