from __future__ import annotations

import pytest

from router.overview.live_overview import CPU_SHARE, ScrapePacer


@pytest.mark.parametrize(
    ("others", "cost", "apart"),
    [
        (0.0, 0.01, 1.0),
        (0.0, 0.3, 0.3 / CPU_SHARE),
        (0.5, 0.01, 1.0),  # streams run, too
        (0.5, 0.3, 0.3 / CPU_SHARE),
        (1.0, 0.0, 1.0),
    ],
)
def test_looks_take_a_share_of_a_core(others: float, cost: float, apart: float) -> None:
    pace = ScrapePacer(100.0, 7.0, min_interval_s=1.0)
    assert pace.due(100.0)
    at, cpu = 110.0, 7.0 + 10 * others
    for _ in range(3):
        pace.begin(at, cpu)
        pace.end(at + 0.5, cpu + 0.5 * others + cost)
        assert not pace.due(at + apart - 0.01)
        assert pace.due(at + apart + 0.01)
        at, cpu = at + apart + 0.01, cpu + (apart + 0.01) * others + cost


def test_a_moment_says_nothing_about_others() -> None:
    pace = ScrapePacer(100.0, 7.0, min_interval_s=1.0)
    pace.begin(100.01, 7.01)
    pace.end(100.51, 7.51)
    assert not pace.due(104.9)
    pace.begin(110.0, 7.51)
    pace.end(112.0, 7.51)  # somebody hung
    pace.begin(112.0, 7.51)
    pace.end(112.1, 7.61)
    assert not pace.due(112.9)
    assert pace.due(113.1)
