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
PRIOR_GROWTH = 0.1
"""Growth in the periods before a cluster began. They count as long as they are among the last ones,
so that its first change of the load is one of many."""
HIGH_QUANTILE = 0.97
"""Decode pools have room for so much: with room for a mean, fewer requests of the declared day met
the objectives for as many GPU-hours (``bench.pools --quick``)."""
_STEPS = np.array((0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, MAX_GROWTH))
"""Values of growth that pools are sized for: each takes time."""
_BELOW = np.append(0.0, (_STEPS[1:] + _STEPS[:-1]) / 2.0)
_ABOVE = np.append(_BELOW[1:], MAX_GROWTH)


def expected_growth(seen: Sequence[float]) -> tuple[float, ...]:
    """Return the growth in each of the last GROWTH_PERIODS, any of which may come again."""
    before = (PRIOR_GROWTH,) * (GROWTH_PERIODS - len(seen))
    return tuple(min(MAX_GROWTH, x) for x in (*before, *seen))


def growth_shares(growth: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Return the distribution of growth, as pairs of a value and its share. Each of ``growth`` may
    come again in any part: it counts evenly from 0 to its value. So the demand has no jump where
    large ones come in more than the share of requests that may be late."""
    if not growth:
        return ((0.0, 1.0),)
    values = np.clip(np.asarray(growth, dtype=np.float64), 1e-9, MAX_GROWTH)
    parts = (np.clip(values[:, None], _BELOW, _ABOVE) - _BELOW) / values[:, None]
    shares = parts.mean(axis=0)
    return tuple((float(_STEPS[i]), float(shares[i])) for i in np.flatnonzero(shares))


def high_growth(growth: Sequence[float]) -> float:
    """Return a high quantile of these values; 0 without values."""
    seen = sorted(growth)
    return seen[math.ceil(HIGH_QUANTILE * len(seen)) - 1] if seen else 0.0
