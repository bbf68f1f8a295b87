"""Growth of the load while a worker starts: its distribution."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.sizing.growth import expected_growth, growth_shares, high_growth

SEEN = st.lists(st.floats(0, 1), min_size=1, max_size=60)


@given(SEEN)
def test_each_growth_counts_evenly_up_to_its_value(seen: list[float]) -> None:
    shares = growth_shares(seen)
    assert sum(share for _, share in shares) == pytest.approx(1.0)
    assert sum(x * share for x, share in shares) == pytest.approx(
        sum(seen) / len(seen) / 2, abs=0.02
    )
    assert len(shares) <= 14 and all(0 <= x <= 1 and share > 0 for x, share in shares)


@given(st.floats(0, 1), st.integers(1, 60))
def test_one_growth_of_few_is_none_of_a_high_quantile(growth: float, known: int) -> None:
    assert high_growth(expected_growth((*(0.0,) * (known - 1), growth))) <= 0.1


def test_more_than_a_doubling_counts_as_one() -> None:
    assert growth_shares((7.0, -1.0)) == growth_shares((1.0, 0.0))


def test_no_values_are_no_growth() -> None:
    assert growth_shares(()) == ((0.0, 1.0),)
    assert high_growth(()) == 0.0


def test_what_was_seen_takes_the_place_of_what_is_assumed() -> None:
    assert expected_growth(()) == (0.1,) * 60
    assert expected_growth((0.0, 7.0)) == (*(0.1,) * 58, 0.0, 1.0)
    assert expected_growth((0.3,) * 60) == (0.3,) * 60
