"""Histograms of lengths, and points that stand for them."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from cluster.observation.request_lengths import BOUNDS, HistogramBuilder, LengthHistogram
from router.generation.metrics import TOKEN_BUCKETS

WEIGHTS = [b - a for a, b in pairwise(BOUNDS)]


def histogram(values: list[int]) -> LengthHistogram:
    tally = HistogramBuilder()
    for value in values:
        tally.add(value)
    return tally.histogram()


def together(*histograms: LengthHistogram) -> LengthHistogram:
    return LengthHistogram.together(histograms)


def moment(histogram: LengthHistogram, power: int) -> float:
    return math.fsum(w * p**power for w, p in zip(WEIGHTS, histogram.points(), strict=True))


@pytest.mark.parametrize("sigma", [0.3, 0.7, 1.0, 1.4])
def test_points_have_the_moments_of_the_values(sigma: float) -> None:
    rng = random.Random(1)
    values = [max(1, round(rng.lognormvariate(6, sigma))) for _ in range(5000)]
    found = histogram(values)
    assert moment(found, 1) == pytest.approx(sum(values) / 5000)
    assert moment(found, 2) == pytest.approx(sum(v * v for v in values) / 5000, rel=0.1)
    assert found.mean == pytest.approx(sum(values) / 5000)


@pytest.mark.parametrize("value", [1, 16, 17, 512, 131072, 300000])
def test_equal_values(value: int) -> None:
    found = histogram([value] * 7)
    points = found.points()
    assert moment(found, 1) == pytest.approx(value)
    assert list(points) == sorted(points)
    assert points[0] > 0
    assert points[-1] <= 2 * value + 1


def test_nothing_has_no_points() -> None:
    assert LengthHistogram().points() == ()
    assert LengthHistogram().mean == 0.0


def test_a_sum_that_the_buckets_do_not_allow_is_cut() -> None:
    counts = histogram([100, 100]).counts
    assert LengthHistogram(TOKEN_BUCKETS, counts, 1e18).mean == pytest.approx(128)
    assert LengthHistogram(TOKEN_BUCKETS, counts, 0.0).mean == pytest.approx(91)


def test_two_together() -> None:
    assert together(histogram([5, 600]), histogram([70])) == histogram([5, 70, 600])


def test_of_two_versions_that_with_more_counts() -> None:
    other = LengthHistogram((10.0,), (1.0, 0.0), 5.0)
    ours = histogram([5, 600])
    assert together(ours, other) == together(other, ours) == ours


def test_from_prometheus_buckets() -> None:
    ours = histogram([5, 70, 600, 200000])
    ups = [(edge, float(sum(ours.counts[: i + 1]))) for i, edge in enumerate(TOKEN_BUCKETS)]
    assert LengthHistogram.cumulated([*ups, (math.inf, 4.0)], ours.total) == ours


@pytest.mark.parametrize(
    "buckets",
    [
        [],
        [(math.inf, 3.0)],
        [(16.0, 1.0), (32.0, 2.0)],
        [(-1.0, 1.0), (math.inf, 3.0)],
        [*((float(i + 1), 1.0) for i in range(1000)), (math.inf, 1.0)],
    ],
)
def test_what_is_no_histogram_is_empty(buckets: list[tuple[float, float]]) -> None:
    assert LengthHistogram.cumulated(buckets, 10.0).count == 0


def test_buckets_read_at_moments_of_their_own_never_shrink() -> None:
    found = LengthHistogram.cumulated([(16.0, 3.0), (32.0, 2.0), (math.inf, 4.0)], 50.0)
    assert found.counts == (3.0, 0.0, 1.0)
