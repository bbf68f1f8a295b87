"""Turns the counts of routers into the samples of the policy's request mix. Pure.

Routers have three separate histograms and no joint distribution of lengths. So:

    uncached  from its histogram, scaled to the prompts that arrived: those that are still queued
              or were refused count by the share of prompt tokens that caches did not have
    cached    two values, for the samples up to the mean uncached length and for those above it, of
              which the mean and the pairs of an uncached and a cached token are those counted
    output    from its histogram and from the lengths that outputs have passed
              (``arriving_lengths``); the mean product with the prompt is that counted, as far as a
              share of the prompts that have the longest (or the shortest) outputs of all can bring
              it there. A sequence holds its prompt's KV for as long as its output takes

Rates, means, the attention between cached and uncached tokens and, within that, the mean product
of prompt and output are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec

from cluster.observation.request_lengths import (
    BOUNDS,
    PARTS,
    STRATA,
    HistogramBuilder,
    LengthHistogram,
    arriving_lengths,
)
from cluster.sizing.snapshot import RequestSample
from router.generation.metrics import passed_edges
from router.placement.output_lengths import INITIAL_OUTPUT_TOKENS

STEP = 7
"""The i-th stratum of prompts is paired with the (STEP*i mod STRATA)-th of outputs. Of all steps
this one leaves the least correlation (log-normal lengths: at most 8% of a mean at sigma 1.5)."""


class RunningMean(msgspec.Struct, frozen=True, array_like=True):
    """A sum in seconds of ``count`` values."""

    total: float = 0.0
    count: float = 0.0

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count > 0 else None

    def scaled(self, factor: float) -> RunningMean:
        """Return the mean of ``factor`` times as many values."""
        return RunningMean(factor * self.total, factor * self.count)

    @classmethod
    def together(cls, means: Iterable[RunningMean]) -> RunningMean:
        of = list(means)
        return cls(math.fsum(m.total for m in of), math.fsum(m.count for m in of))


class TrafficCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What all routers counted in ``seconds``. ``arrivals``: refused requests included.
    ``prompts``: at arrival. ``uncached``: at the first token, of prompts of ``answered_tokens`` in
    all, with ``cached_pairs`` pairs of an uncached and a cached token. ``passed``: edges that
    outputs have passed. ``outputs``: at the end, of prompts of ``ended_tokens`` in all, with
    ``output_pairs`` pairs of a prompt's and an output's token."""

    seconds: float = 0.0
    arrivals: float = 0.0
    prompts: LengthHistogram = LengthHistogram()
    uncached: LengthHistogram = LengthHistogram()
    answered_tokens: float = 0.0
    cached_pairs: float = 0.0
    passed: LengthHistogram = LengthHistogram()
    outputs: LengthHistogram = LengthHistogram()
    ended_tokens: float = 0.0
    output_pairs: float = 0.0
    ttft: RunningMean = RunningMean()
    tpot: RunningMean = RunningMean()

    @classmethod
    def together(cls, counted: Iterable[TrafficCounts]) -> TrafficCounts:
        """Return the sum of counts of successive periods, or (where all but one have 0 seconds) of
        one period."""
        of = list(counted)
        return cls(
            seconds=math.fsum(c.seconds for c in of),
            arrivals=math.fsum(c.arrivals for c in of),
            prompts=LengthHistogram.together(c.prompts for c in of),
            uncached=LengthHistogram.together(c.uncached for c in of),
            answered_tokens=math.fsum(c.answered_tokens for c in of),
            cached_pairs=math.fsum(c.cached_pairs for c in of),
            passed=LengthHistogram.together(c.passed for c in of),
            outputs=LengthHistogram.together(c.outputs for c in of),
            ended_tokens=math.fsum(c.ended_tokens for c in of),
            output_pairs=math.fsum(c.output_pairs for c in of),
            ttft=RunningMean.together(c.ttft for c in of),
            tpot=RunningMean.together(c.tpot for c in of),
        )

    def scaled(self, factor: float) -> TrafficCounts:
        """Return the counts of ``factor`` times as many requests in the same time."""
        return TrafficCounts(
            seconds=self.seconds,
            arrivals=factor * self.arrivals,
            prompts=self.prompts.scaled(factor),
            uncached=self.uncached.scaled(factor),
            answered_tokens=factor * self.answered_tokens,
            cached_pairs=factor * self.cached_pairs,
            passed=self.passed.scaled(factor),
            outputs=self.outputs.scaled(factor),
            ended_tokens=factor * self.ended_tokens,
            output_pairs=factor * self.output_pairs,
            ttft=self.ttft.scaled(factor),
            tpot=self.tpot.scaled(factor),
        )


def request_samples(counts: TrafficCounts) -> tuple[RequestSample, ...]:
    """Return some 30 to 60 samples whose weights add up to 1; none where no prompt is known. Until
    an output has ended, its length is what a router expects then."""
    prompts, uncached = counts.prompts, counts.uncached
    shape = uncached.points() or prompts.points()
    if not shape:
        return ()
    arrived = prompts.mean or counts.answered_tokens / max(1.0, uncached.count)
    share = min(1.0, uncached.total / counts.answered_tokens) if counts.answered_tokens > 0 else 1.0
    own = uncached.mean if uncached.count else prompts.mean
    scale = arrived * share / own if own > 0 else 0.0
    arriving = arriving_lengths(counts.outputs, counts.passed)
    outputs = arriving.points() or (INITIAL_OUTPUT_TOKENS,) * len(shape)
    cached = arrived * (1.0 - share)
    ratio = _output_ratio(counts)
    apart = list(_paired(shape, outputs, lambda i: STEP * i % STRATA))
    along = list(_paired(shape, outputs, (lambda i: i) if ratio > 1 else lambda i: STRATA - 1 - i))
    factors = _cached_factors([(u, w) for u, _, w in apart], _pair_ratio(counts))

    def samples(paired: list[tuple[float, float, float]], weight: float) -> list[RequestSample]:
        factor = dict(zip((u for u, _, _ in apart), factors, strict=True))
        return [RequestSample(u * scale, cached * factor[u], o, weight * w) for u, o, w in paired]

    mixed = samples(apart, 1.0)
    wanted = ratio * arrived * math.fsum(o * w for _, o, w in apart)
    moved = _share_between(_product(mixed), _product(samples(along, 1.0)), wanted)
    if moved > 0:
        mixed = samples(apart, 1.0 - moved) + samples(along, moved)
    return tuple(s for s in mixed if s.weight > 0)


def _product(samples: Iterable[RequestSample]) -> float:
    """Return the mean product of prompt and output tokens."""
    return math.fsum((s.uncached + s.cached) * s.output * s.weight for s in samples)


def _share_between(first: float, last: float, wanted: float) -> float:
    """Return which share of the way from ``first`` to ``last`` comes nearest to ``wanted``."""
    return min(1.0, max(0.0, (wanted - first) / (last - first))) if last != first else 0.0


def _output_ratio(counts: TrafficCounts) -> float:
    """Return how many times as many pairs of a prompt's and an output's token there were as if the
    two were uncorrelated; 1 where nothing is known."""
    uncorrelated = counts.ended_tokens * counts.outputs.mean if counts.outputs.count else 0.0
    return counts.output_pairs / uncorrelated if counts.output_pairs * uncorrelated > 0 else 1.0


def _pair_ratio(counts: TrafficCounts) -> float:
    """Return how many times as many pairs of an uncached and a cached token there were as if the
    two were uncorrelated; 1 where nothing is known."""
    cached = counts.answered_tokens - counts.uncached.total
    uncorrelated = counts.uncached.mean * cached
    return counts.cached_pairs / uncorrelated if counts.cached_pairs * uncorrelated > 0 else 1.0


def _cached_factors(lengths: Sequence[tuple[float, float]], ratio: float) -> list[float]:
    """Return cached tokens over their mean for (uncached tokens, weight). Their mean is 1, and
    their mean product with the uncached tokens is ``ratio`` times the mean of these, as far as a
    share of the cached tokens that goes with one half of the lengths alone can bring it there."""
    mean = math.fsum(u * w for u, w in lengths)
    in_half = [(u <= mean) == (ratio < 1.0) for u, _ in lengths]
    half = [of for of, inside in zip(lengths, in_half, strict=True) if inside]
    weight = math.fsum(w for _, w in half)
    reach = math.fsum(u * w for u, w in half) - mean * weight  # of the whole share, times weight
    if reach == 0:
        return [1.0] * len(lengths)
    share = min(1.0, (ratio - 1.0) * mean * weight / reach)
    return [1.0 - share + (share / weight if inside else 0.0) for inside in in_half]


def _paired(
    first: Sequence[float], second: Sequence[float], order: Callable[[int], int]
) -> Iterator[tuple[float, float, float]]:
    """Yield points of two histograms and their joint weight. ``order``: the stratum of the second
    one for each of the first."""
    weights = [b - a for a, b in pairwise(BOUNDS)]
    for i in range(STRATA):
        j = order(i)
        for a in _parts(i):
            for b in _parts(j):
                yield first[a], second[b], weights[a] * weights[b] * STRATA


def _parts(stratum: int) -> range:
    """Return the indices of a stratum's points."""
    return range(stratum, stratum + (PARTS if stratum == STRATA - 1 else 1))


class RequestCounter:
    """Counts requests one by one, as routers do for their metrics; the simulator uses it."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._arrivals = 0
        self._prompts, self._uncached = HistogramBuilder(), HistogramBuilder()
        self._passed, self._outputs = HistogramBuilder(), HistogramBuilder()
        self._answered = self._pairs = self._ended_tokens = self._output_pairs = 0.0
        self._ttft = self._tpot = (0.0, 0)

    def arrived(self, prompt: int) -> None:
        """Count a request of ``prompt`` tokens, whether or not it is refused."""
        self._arrivals += 1
        self._prompts.add(prompt)

    def first_token(self, prompt: int, cached: int, ttft_s: float) -> None:
        self._uncached.add(prompt - cached)
        self._answered += prompt
        self._pairs += (prompt - cached) * cached
        self._ttft = self._ttft[0] + ttft_s, self._ttft[1] + 1

    def grew(self, before: int, now: int) -> None:
        """Count an output that has grown from ``before`` to ``now`` tokens."""
        for edge in passed_edges(before, now):
            self._passed.add(edge)

    def ended(self, prompt: int, output: int, tpot_s: float | None) -> None:
        """Count a finished request. ``tpot_s``: None for a single token."""
        self._outputs.add(output)
        self._ended_tokens += prompt
        self._output_pairs += prompt * output
        if tpot_s is not None:
            self._tpot = self._tpot[0] + tpot_s, self._tpot[1] + 1

    def take(self, seconds: float) -> TrafficCounts:
        """Return the counts of the last ``seconds``, and begin anew."""
        found = TrafficCounts(
            seconds=seconds,
            arrivals=self._arrivals,
            prompts=self._prompts.histogram(),
            uncached=self._uncached.histogram(),
            answered_tokens=self._answered,
            cached_pairs=self._pairs,
            passed=self._passed.histogram(),
            outputs=self._outputs.histogram(),
            ended_tokens=self._ended_tokens,
            output_pairs=self._output_pairs,
            ttft=RunningMean(*self._ttft),
            tpot=RunningMean(*self._tpot),
        )
        self._clear()
        return found
