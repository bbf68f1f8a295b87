"""When requests of an open loop are due."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal, get_args

Kind = Literal["poisson", "constant", "gamma"]
KINDS: tuple[str, ...] = get_args(Kind)


def gap(kind: Kind, rate: float, burstiness: float, draw: random.Random) -> float:
    """Seconds to the next arrival; the mean is 1 / ``rate`` whatever the kind.

    ``gamma``: its shape is ``burstiness``, so the coefficient of variation is burstiness ** -0.5:
    1 is Poisson, less comes in bursts, more is evener.
    """
    if kind == "constant":
        return 1 / rate
    if kind == "poisson":
        return draw.expovariate(rate)
    return draw.gammavariate(burstiness, 1 / (rate * burstiness))


def times(kind: Kind, rate: float, burstiness: float, draw: random.Random) -> Iterator[float]:
    """Seconds after the beginning, without end; the first is 0."""
    at = 0.0
    while True:
        yield at
        at += gap(kind, rate, burstiness, draw)
