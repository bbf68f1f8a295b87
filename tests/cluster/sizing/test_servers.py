"""How many prefill workers a load takes."""

from __future__ import annotations

import math

import pytest

from cluster.sizing.demand import LOAD_GROWTH, MIN_HEADROOM, headroom, prefill_workers
from cluster.sizing.queueing import ServiceTime

PROMPT = ServiceTime(mean_s=0.5, spread=1.0, q90_s=1.0)


def test_what_growth_queues_up_is_half_of_the_patience() -> None:
    """The integral of the docstring, step by step."""
    patience_s, start_s, steps = 3.0, 60.0, 100_000
    there = 1.0 + headroom(patience_s, start_s)
    waits = sum(
        max(0.0, 1.0 + LOAD_GROWTH * i / steps - there) * start_s / steps for i in range(steps)
    )
    assert waits == pytest.approx(patience_s / 2, rel=1e-3)


@pytest.mark.parametrize(
    "patience_s, start_s, least",
    [
        (0.0, 60.0, LOAD_GROWTH),
        (1e-3, 1e-3, MIN_HEADROOM),
        (30.0, 60.0, MIN_HEADROOM),
        (3.0, 0.0, MIN_HEADROOM),
    ],
)
def test_patience_and_quick_starts_spare_workers(
    patience_s: float, start_s: float, least: float
) -> None:
    assert headroom(patience_s, start_s) == pytest.approx(least)


def test_a_large_pool_is_bound_by_growth_and_a_small_one_by_chance() -> None:
    assert prefill_workers(100.0, PROMPT, 3.0, 60.0) == math.ceil(100 * (1 + headroom(3.0, 60.0)))
    assert prefill_workers(1.0, PROMPT, 0.1, 60.0) > math.ceil(1 + headroom(0.1, 60.0))


def test_without_load_or_patience() -> None:
    assert prefill_workers(0.0, PROMPT, 3.0, 60.0) == 0
    assert prefill_workers(8.0, PROMPT, 0.0, 60.0) == 10
