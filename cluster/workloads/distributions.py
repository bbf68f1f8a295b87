"""Distributions of request lengths, with their text forms, and of the gaps between requests."""

from __future__ import annotations

import math
import random
from typing import Literal, NamedTuple

from protocol.errors import UsageError

FORMS = "N, uniform:LOW-HIGH, or lognormal:MEAN,SIGMA[,MAX]"


class ConstantLength(NamedTuple):
    """Every length is ``tokens``."""

    tokens: int

    def draw(self, _: random.Random) -> int:
        return self.tokens


class UniformLength(NamedTuple):
    """Lengths from ``low`` to ``high`` tokens, both included, are equally likely."""

    low: int
    high: int

    def draw(self, draw: random.Random) -> int:
        return draw.randint(self.low, self.high)


class LogNormalLength(NamedTuple):
    """A log-normal distribution with this ``mean`` in tokens, cut off at ``most`` tokens.

    ``sigma`` is the standard deviation of the logarithm: mu = ln(mean) - sigma^2 / 2.
    """

    mean: float
    sigma: float
    most: int

    def draw(self, draw: random.Random) -> int:
        mu = math.log(self.mean) - self.sigma**2 / 2
        return max(1, min(self.most, round(draw.lognormvariate(mu, self.sigma))))


Length = ConstantLength | UniformLength | LogNormalLength


def parse_length(text: str, option: str) -> Length:
    """Parse one of ``FORMS``. Raises StartupError, which names ``option``, for anything else."""
    wrong = UsageError(f"{option}: expected {FORMS}, with at least 1 token, not {text!r}")
    kind, _, rest = text.rpartition(":")
    try:
        found = _parse(kind, rest)
    except (ValueError, TypeError):
        raise wrong from None
    if not _is_valid(found):
        raise wrong
    return found


def _parse(kind: str, rest: str) -> Length:
    if kind == "uniform":
        low, high = rest.split("-")
        return UniformLength(int(low), int(high))
    if kind == "lognormal":
        mean, sigma, *most = rest.split(",")
        return LogNormalLength(float(mean), float(sigma), *map(int, most or ["1000000"]))
    if kind:
        raise ValueError(kind)
    return ConstantLength(int(rest))


def _is_valid(length: Length) -> bool:
    match length:
        case ConstantLength(tokens):
            return tokens >= 1
        case UniformLength(low, high):
            return 1 <= low <= high
        case LogNormalLength(mean, sigma, most):
            return math.isfinite(mean) and mean >= 1 and 0 <= sigma <= 10 and most >= 1


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
