"""Growth of the load while a worker starts. Pure.

It is seen once in that time, as a share of the load, and what was seen may come again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

GROWTH_PERIODS = 60
"""Periods of a worker's start of which the growth is remembered."""
MAX_GROWTH = 1.0
"""The growth of a load of a few requests is chance."""
PRIOR_GROWTH = (0.1,) * 10
"""Growth in the first periods of a cluster, in which nothing is known."""
HIGH_QUANTILE = 0.97
"""Decode pools have room for so much: with room for a mean, fewer requests of the declared day met
the objectives for as many GPU-hours (``bench.pools --quick``)."""
STEPS = 10
"""Steps from 0 to 1 in which a growth is known."""


def expected_growth(seen: Sequence[float]) -> tuple[float, ...]:
    """Return the growth of the periods that may come again: ``seen``, and PRIOR_GROWTH where less
    is known."""
    return tuple(min(MAX_GROWTH, x) for x in (*PRIOR_GROWTH[len(seen) :], *seen))


def growth_shares(growth: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Return the distribution of these values, as pairs of a value and its share. A value counts
    for the two multiples of 1/STEPS beside it, so that the mean stays what it is; no growth without
    values."""
    if not growth:
        return ((0.0, 1.0),)
    steps = STEPS * np.asarray(growth, dtype=np.float64)
    below = np.floor(steps).astype(np.int64)
    above = steps - below
    weights = np.concatenate((1.0 - above, above))
    shares = np.bincount(np.concatenate((below, below + 1)), weights) / len(growth)
    return tuple((i / STEPS, float(share)) for i, share in enumerate(shares) if share > 0)


def high_growth(growth: Sequence[float]) -> float:
    """Return a high quantile of these values; 0 without values."""
    seen = sorted(growth)
    return seen[math.ceil(HIGH_QUANTILE * len(seen)) - 1] if seen else 0.0
