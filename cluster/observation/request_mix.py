"""From what routers counted to the mix of requests that the policy sees. Pure.

Routers tell three histograms, not how lengths go together. So:

    uncached  as of its histogram, scaled to the prompts that arrived: those that are still queued,
              or were refused, count by the share of prompt tokens that caches did not have
    cached    its mean, with every prompt
    output    as of its histogram, uncorrelated with the prompt

What is lost: that long prompts have long answers, or short ones (the KV that residents hold is off
by that correlation), and that much cached goes with little uncached (so is the attention between
the two). Rates and means are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec

from cluster.observation.request_lengths import BOUNDS, PARTS, STRATA, Histogram, Tally
from cluster.sizing.snapshot import Sample
from router.placement.learned import OUTPUT

STEP = 7
"""The i-th stratum of prompts goes with the (STEP*i mod STRATA)-th of outputs: of all steps the one
that leaves the least correlation (log-normal lengths: none of 8% of a mean at sigma 1.5)."""


class Mean(msgspec.Struct, frozen=True, array_like=True):
    """Of ``count`` values, in seconds."""

    total: float = 0.0
    count: float = 0.0

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count > 0 else None

    @classmethod
    def together(cls, means: Iterable[Mean]) -> Mean:
        of = list(means)
        return cls(math.fsum(m.total for m in of), math.fsum(m.count for m in of))


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What all routers counted in ``seconds``. ``arrivals``: with those refused. ``prompts``: at
    arrival; ``uncached``: with the first token, of prompts of ``answered_tokens`` in all;
    ``outputs``: at the end."""

    seconds: float = 0.0
    arrivals: float = 0.0
    prompts: Histogram = Histogram()
    uncached: Histogram = Histogram()
    answered_tokens: float = 0.0
    outputs: Histogram = Histogram()
    ttft: Mean = Mean()
    tpot: Mean = Mean()

    @classmethod
    def together(cls, counted: Iterable[Counted]) -> Counted:
        """One after the other, or (where all but one are of no seconds) at once."""
        of = list(counted)
        return cls(
            seconds=math.fsum(c.seconds for c in of),
            arrivals=math.fsum(c.arrivals for c in of),
            prompts=Histogram.together(c.prompts for c in of),
            uncached=Histogram.together(c.uncached for c in of),
            answered_tokens=math.fsum(c.answered_tokens for c in of),
            outputs=Histogram.together(c.outputs for c in of),
            ttft=Mean.together(c.ttft for c in of),
            tpot=Mean.together(c.tpot for c in of),
        )


def samples(of: Counted) -> tuple[Sample, ...]:
    """Some 30, whose weights add up to 1; none where no prompt is known. As long as no answer has
    ended, its length is what a router expects then."""
    prompts, uncached = of.prompts, of.uncached
    shape = uncached.points() or prompts.points()
    if not shape:
        return ()
    arrived = prompts.mean or of.answered_tokens / max(1.0, uncached.count)
    share = min(1.0, uncached.total / of.answered_tokens) if of.answered_tokens > 0 else 1.0
    own = uncached.mean if uncached.count else prompts.mean
    scale = arrived * share / own if own > 0 else 0.0
    outputs = of.outputs.points() or (OUTPUT,) * len(shape)
    cached = arrived * (1.0 - share)
    return tuple(Sample(u * scale, cached, o, w) for u, o, w in _paired(shape, outputs))


def _paired(
    first: Sequence[float], second: Sequence[float]
) -> Iterator[tuple[float, float, float]]:
    """Points of two histograms and their weight together, as good as uncorrelated."""
    weights = [b - a for a, b in pairwise(BOUNDS)]
    for i in range(STRATA):
        j = STEP * i % STRATA
        for a in _parts(i):
            for b in _parts(j):
                yield first[a], second[b], weights[a] * weights[b] * STRATA


def _parts(stratum: int) -> range:
    """Indices of a stratum's points."""
    return range(stratum, stratum + (PARTS if stratum == STRATA - 1 else 1))


class Counter:
    """Counts requests one by one, as routers do for their metrics."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._arrivals = 0
        self._prompts, self._uncached, self._outputs = Tally(), Tally(), Tally()
        self._answered = 0.0
        self._ttft = self._tpot = (0.0, 0)

    def arrived(self, prompt: int) -> None:
        """A request, to be refused or not. Tokens."""
        self._arrivals += 1
        self._prompts.add(prompt)

    def first_token(self, prompt: int, cached: int, ttft_s: float) -> None:
        self._uncached.add(prompt - cached)
        self._answered += prompt
        self._ttft = self._ttft[0] + ttft_s, self._ttft[1] + 1

    def ended(self, output: int, tpot_s: float | None) -> None:
        """One that had its first token. ``tpot_s``: None for a single token."""
        self._outputs.add(output)
        if tpot_s is not None:
            self._tpot = self._tpot[0] + tpot_s, self._tpot[1] + 1

    def take(self, seconds: float) -> Counted:
        """What came since it was last taken, which was ``seconds`` ago."""
        found = Counted(
            seconds=seconds,
            arrivals=self._arrivals,
            prompts=self._prompts.histogram(),
            uncached=self._uncached.histogram(),
            answered_tokens=self._answered,
            outputs=self._outputs.histogram(),
            ttft=Mean(*self._ttft),
            tpot=Mean(*self._tpot),
        )
        self._clear()
        return found
