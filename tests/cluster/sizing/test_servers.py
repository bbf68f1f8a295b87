"""How many prefill workers a load takes."""

from __future__ import annotations

import math

import pytest

from cluster.sizing.demand import ERROR, GROWTH, servers, spare
from cluster.sizing.moments import Service

PROMPT = Service(mean_s=0.5, spread=1.0, q90_s=1.0)


def test_what_growth_queues_up_is_half_of_the_patience() -> None:
    """The integral of the docstring, step by step."""
    patience_s, start_s, steps = 3.0, 60.0, 100_000
    there = 1.0 + spare(patience_s, start_s)
    waits = sum(max(0.0, 1.0 + GROWTH * i / steps - there) * start_s / steps for i in range(steps))
    assert waits == pytest.approx(patience_s / 2, rel=1e-3)


@pytest.mark.parametrize(
    "patience_s, start_s, least",
    [(0.0, 60.0, GROWTH), (1e-3, 1e-3, ERROR), (30.0, 60.0, ERROR), (3.0, 0.0, ERROR)],
)
def test_patience_and_quick_starts_spare_workers(
    patience_s: float, start_s: float, least: float
) -> None:
    assert spare(patience_s, start_s) == pytest.approx(least)


def test_a_large_pool_is_bound_by_growth_and_a_small_one_by_chance() -> None:
    assert servers(100.0, PROMPT, 3.0, 60.0) == math.ceil(100 * (1 + spare(3.0, 60.0)))
    assert servers(1.0, PROMPT, 0.1, 60.0) > math.ceil(1 + spare(0.1, 60.0))


def test_without_load_or_patience() -> None:
    assert servers(0.0, PROMPT, 3.0, 60.0) == 0
    assert servers(8.0, PROMPT, 0.0, 60.0) == 10
