"""Against closed forms and a simulated queue."""

from __future__ import annotations

import heapq
import math
import time
from random import Random

import pytest

from cluster.sizing.queueing import erlang_c, late_share, least_servers, mean_wait_s


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
    assert mean_wait_s(servers, load, 1.0, 0.0) == math.inf
    assert late_share(servers, load, 1.0, 0.0, 10.0) == 1.0


def test_no_load_waits_for_nothing() -> None:
    assert erlang_c(3, 0.0) == 0.0
    assert mean_wait_s(3, 0.0, 0.0, 0.0) == 0.0


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_waits_of_a_simulated_queue(spread: float) -> None:
    """M/D/4 and M/M/4 at 80%: mean wait and tail within what the approximation promises."""
    chance, servers, load = Random(7), 4, 3.2
    free = [0.0] * servers
    now, waits = 0.0, []
    for _ in range(60_000):
        now += chance.expovariate(load)
        start = max(now, heapq.heappop(free))
        heapq.heappush(free, start + (chance.expovariate(1.0) if spread else 1.0))
        waits.append(start - now)
    assert sum(waits) / len(waits) == pytest.approx(
        mean_wait_s(servers, load, 1.0, spread), rel=0.12
    )
    seen = sum(w > 2.0 for w in waits) / len(waits)
    assert seen == pytest.approx(late_share(servers, load, 1.0, spread, 2.0), abs=0.03)


def test_the_least_number_is_the_least() -> None:
    n = least_servers(6.3, 0.5, 1.0, 0.4, 0.1)
    assert late_share(n, 6.3, 0.5, 1.0, 0.4) <= 0.1 < late_share(n - 1, 6.3, 0.5, 1.0, 0.4)


@pytest.mark.parametrize("load", [20_000.0, 1e9])
def test_a_load_beyond_all_limits_takes_no_longer(load: float) -> None:
    """A step for each server at most, however impatient; nothing where no limit reaches."""
    began = time.thread_time()
    assert least_servers(load, 0.5, 1.0, 1e-6, 0.1) > load
    assert time.thread_time() - began < 0.5
