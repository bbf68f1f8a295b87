"""How many tokens prompts and outputs have: one distribution each, or a weighted mix of pairs."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from protocol.errors import StartupError

FORMS = "N, uniform:LOW-HIGH, or lognormal:MEAN,SIGMA[,MAX]"


class Fixed(NamedTuple):
    tokens: int

    def draw(self, _: random.Random) -> int:
        return self.tokens


class Uniform(NamedTuple):
    low: int
    high: int

    def draw(self, draw: random.Random) -> int:
        return draw.randint(self.low, self.high)


class LogNormal(NamedTuple):
    """``mean`` in tokens; ``sigma`` of the logarithm. mu = ln(mean) - sigma^2 / 2."""

    mean: float
    sigma: float
    most: int

    def draw(self, draw: random.Random) -> int:
        mu = math.log(self.mean) - self.sigma**2 / 2
        return max(1, min(self.most, round(draw.lognormvariate(mu, self.sigma))))


Length = Fixed | Uniform | LogNormal


def parse_length(text: str, option: str) -> Length:
    """Raises StartupError, which names ``option``, for anything but ``FORMS``."""
    wrong = StartupError(f"{option}: expected {FORMS}, with at least 1 token, not {text!r}")
    kind, _, rest = text.rpartition(":")
    try:
        found = _parse(kind, rest)
    except (ValueError, TypeError):
        raise wrong from None
    if not _sound(found):
        raise wrong
    return found


def _parse(kind: str, rest: str) -> Length:
    if kind == "uniform":
        low, high = rest.split("-")
        return Uniform(int(low), int(high))
    if kind == "lognormal":
        mean, sigma, *most = rest.split(",")
        return LogNormal(float(mean), float(sigma), *map(int, most or ["1000000"]))
    if kind:
        raise ValueError(kind)
    return Fixed(int(rest))


def _sound(length: Length) -> bool:
    match length:
        case Fixed(tokens):
            return tokens >= 1
        case Uniform(low, high):
            return 1 <= low <= high
        case LogNormal(mean, sigma, most):
            return math.isfinite(mean) and mean >= 1 and 0 <= sigma <= 10 and most >= 1


class Share(NamedTuple):
    """A part of the requests: ``weight`` against the others' weights."""

    weight: float
    prompt: Length
    output: Length


def parse_mix(text: str) -> tuple[Share, ...]:
    """``0.75:128/64,0.25:1500/64``: weight, prompt, output. Raises StartupError."""
    shares = []
    for part in text.split(","):
        weight, colon, pair = part.partition(":")
        prompt, slash, output = pair.partition("/")
        if not (colon and slash):
            raise StartupError(f"--mix: expected WEIGHT:PROMPT/OUTPUT,..., not {part!r}")
        shares.append(
            Share(_weight(weight), parse_length(prompt, "--mix"), parse_length(output, "--mix"))
        )
    return tuple(shares)


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not (math.isfinite(weight) and weight > 0):
        raise StartupError(f"--mix: a weight must be a number above 0, not {text!r}")
    return weight


def draw_lengths(mix: Sequence[Share], draw: random.Random) -> tuple[int, int]:
    """Tokens of a prompt and of its output."""
    share = draw.choices(mix, [s.weight for s in mix])[0] if len(mix) > 1 else mix[0]
    return share.prompt.draw(draw), share.output.draw(draw)
