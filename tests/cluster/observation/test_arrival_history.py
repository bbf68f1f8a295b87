"""Histories of arrivals across changes of the load."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cluster.observation.arrival_history import HISTORY_S, LASTING_S, ArrivalHistory
from cluster.observation.request_mix import RequestCounter
from cluster.observation.sliding_window import SlidingWindow
from cluster.sizing.burstiness import burstiness
from cluster.sizing.demand import demand_by_role
from cluster.sizing.snapshot import NO_CORRECTIONS, Arrivals, RequestMix, SloTargets
from tests.cluster.sizing.worlds import MACHINE

TURN_S = 5.0
LASTING = round(LASTING_S / TURN_S)


def history(*loads: tuple[int, float]) -> ArrivalHistory:
    """Return a history of so many intervals with so many requests each, on average; each load but
    the first is a change."""
    made = ArrivalHistory(TURN_S)
    for at, (intervals, requests) in enumerate(loads):
        for n in range(intervals):
            made.add(round((n + 1) * requests) - round(n * requests))
            if at and n == 0:
                made.record_change(1)
    return made


def counts(of: ArrivalHistory) -> tuple[float, ...]:
    return of.arrivals(TURN_S).counts


@pytest.mark.parametrize("lasting", [1, LASTING - 1, LASTING, LASTING + 5])
def test_what_was_before_a_change_is_at_the_level_after_it(lasting: int) -> None:
    assert counts(history((100, 20), (lasting, 60))) == pytest.approx((60,) * (100 + lasting))


def test_deviations_grow_with_the_root_of_the_load() -> None:
    made = ArrivalHistory(TURN_S)
    for n in range(200):
        made.add(10 if n % 2 else 20)
    for _ in range(LASTING):
        made.add(60)
    made.record_change(LASTING)
    assert counts(made)[98:100] == pytest.approx((60 + 5 * 2, 60 - 5 * 2), abs=0.5)


def test_the_time_of_a_change_is_not_known_exactly() -> None:
    """The load rose four intervals before the change that was found."""
    made = history((200, 0.2))
    for requests in (20, 45, 45, 45, 45, 45, 45):
        made.add(requests)
    made.record_change(3)
    assert max(counts(made)) < 3 * 45


def test_a_change_that_does_not_last_is_a_burst() -> None:
    made = history((100, 20), (10, 60), (LASTING, 20))
    assert max(counts(made)) > 40
    assert burstiness(made.arrivals(TURN_S), 40.0) > 1


def test_bursts_without_end_are_remembered() -> None:
    made = history(*((10, 20 + 40 * (n % 2)) for n in range(80)))
    assert len(counts(made)) == round(HISTORY_S / TURN_S)
    assert burstiness(made.arrivals(TURN_S), 40.0) > 1


@pytest.mark.parametrize("lasting", [LASTING // 2, LASTING - 1, LASTING])
def test_loads_that_alternate_make_no_larger_and_larger_bursts(lasting: int) -> None:
    loads = [(lasting, 45.0), (3 * LASTING, 0.25)] * 30
    early, late = (max(counts(history(*loads[:n], (3, 45.0)))) for n in (6, 60))
    assert late <= 1.1 * early < 10 * 45


@pytest.mark.parametrize("between", [0.0, 0.25])
def test_bursts_are_known_after_a_quiet_time(between: float) -> None:
    made, usual = ArrivalHistory(TURN_S), [60, 60, 60, *[10] * 9]
    for requests in usual * 50:
        made.add(requests)
    before = burstiness(made.arrivals(TURN_S), 40.0)
    for n in range(36):
        made.add(round((n + 1) * between) - round(n * between))
        if n == 2:
            made.record_change(3)
    for requests in usual:
        made.add(requests)
    made.record_change(12)
    assert burstiness(made.arrivals(TURN_S), 40.0) > before / 2


@pytest.mark.parametrize(("was", "now"), [(0, 30), (30, 0)])
def test_nothing_is_known_of_bursts_beside_no_load(was: int, now: int) -> None:
    assert counts(history((100, was), (4, now))) == (now,) * 4


def test_what_was_cleared_does_not_return() -> None:
    made = history((100, 20), (4, 60))
    made.clear()
    made.add(7)
    assert made.arrivals(TURN_S) == Arrivals(TURN_S, (7,))


def windows(rates: list[float], seed: int) -> list[RequestMix]:
    """Return the mix of each turn; requests arrive one by one."""
    rng, sliding, seen = random.Random(seed), SlidingWindow(60.0, 15.0), []
    draws = np.random.default_rng(seed).poisson(np.array(rates) * TURN_S)
    for number in draws:
        counter = RequestCounter()
        for _ in range(int(number)):
            length = max(1, round(rng.lognormvariate(8.0, 0.6)))
            counter.arrived(length)
            counter.first_token(length, 0, 0.3)
            counter.ended(length, 40, 0.02)
        sliding.add(counter.take(TURN_S))
        if (mix := sliding.mix()) is not None:
            seen.append(mix)
    return seen


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("before", [[0.0] * 180, [3.0] * 180, ([9.0] * 60 + [3.0] * 60) * 5])
def test_a_load_that_came_is_no_burst_on_top(seed: int, before: list[float]) -> None:
    """After a minute of 9 requests/s, about as many workers are wanted as if they had always
    come."""

    def wanted(rates: list[float]) -> int:
        mix, goals = windows(rates, seed)[-1], SloTargets(ttft_s=2.0, tpot_s=0.1)
        demand = demand_by_role(mix, {"prefill": MACHINE}, goals, NO_CORRECTIONS, 60.0)
        return demand["prefill"].workers

    assert wanted([*before, *[9.0] * 12]) <= wanted([9.0] * 192) + 1
