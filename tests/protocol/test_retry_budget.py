"""How often a request is tried again: faults at once end it, and survived ones are forgotten."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.retry_budget import DEATH_LIMIT, HAND_BACK_LIMIT, RetryBudget, RetryLimit


def ended_by(limit: RetryLimit, times: list[float]) -> int | None:
    """Return which event ends the request, from 1; None: none of them."""
    budget = RetryBudget(limit)
    for number, at_s in enumerate(times, 1):
        budget.record(at_s)
        if budget.used_up(at_s):
            return number
    return None


def test_a_request_that_kills_three_workers_in_a_row_ends() -> None:
    assert ended_by(DEATH_LIMIT, [5.0, 5.0, 5.0]) == 3
    assert ended_by(DEATH_LIMIT, [0.0, 20.0, 59.0]) == 3


def test_a_request_that_kills_slowly_ends_later() -> None:
    assert ended_by(DEATH_LIMIT, [30.0 * i for i in range(20)]) == 4
    assert ended_by(DEATH_LIMIT, [50.0 * i for i in range(20)]) == 8


def test_survived_deaths_are_forgotten() -> None:
    """A long text that loses a worker each 90 s goes on for as long as it takes."""
    assert ended_by(DEATH_LIMIT, [90.0 * i for i in range(1000)]) is None


def test_many_hand_backs_end_a_request_and_few_do_not() -> None:
    assert ended_by(HAND_BACK_LIMIT, [0.1 * i for i in range(100)]) == HAND_BACK_LIMIT.events
    assert ended_by(HAND_BACK_LIMIT, [60.0 * i for i in range(1000)]) is None


@given(st.lists(st.floats(0, 60, exclude_max=True), min_size=3, max_size=3).map(sorted))
def test_any_three_deaths_within_the_window_end_it(times: list[float]) -> None:
    assert ended_by(DEATH_LIMIT, times) == 3


def test_another_process_goes_on_counting() -> None:
    budget = RetryBudget(DEATH_LIMIT)
    budget.record(0.0)
    budget.record(1.0)
    assert budget.count(1.0) == 2
    there = RetryBudget(DEATH_LIMIT, budget.count(1.0))
    assert not there.used_up(1e6)  # on a clock of its own
    there.record(1e6 + 1)
    assert there.used_up(1e6 + 1)


@pytest.mark.parametrize("level", [3, 1 << 32])
def test_what_a_peer_counts_has_a_bound(level: int) -> None:
    budget = RetryBudget(DEATH_LIMIT, level)
    assert budget.used_up(0.0) and not budget.used_up(DEATH_LIMIT.window_s + 0.1)
    budget.record(0.0, level)
    assert budget.count(0.0) == DEATH_LIMIT.events


def test_what_a_peer_has_counted_decays_before_the_first_death_here() -> None:
    """Two deaths early on, and another one minutes later: it once was the third."""
    there = RetryBudget(DEATH_LIMIT, 2, 10.0)
    there.record(310.0)
    assert not there.used_up(310.0)
