"""Arrival processes: the random gap between one request and the next."""

from __future__ import annotations

import random
from typing import Literal

ArrivalKind = Literal["poisson", "constant", "gamma"]


def draw_gap(kind: ArrivalKind, rate: float, burstiness: float, draw: random.Random) -> float:
    """Return the seconds to the next arrival; the mean is 1 / ``rate`` for every kind.

    ``burstiness`` is the shape of the gamma distribution, so that the coefficient of variation is
    burstiness ** -0.5: a value of 1 is a Poisson process, smaller values make bursts, and larger
    values make arrivals more even.
    """
    if kind == "constant":
        return 1 / rate
    if kind == "poisson":
        return draw.expovariate(rate)
    return draw.gammavariate(burstiness, 1 / (rate * burstiness))
