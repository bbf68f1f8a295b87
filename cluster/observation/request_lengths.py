"""Length histograms of requests, and points that represent them. Pure.

Values are taken to be spread evenly within a bucket. Their sum, which a histogram has, then scales
the points, so that the mean is exact; a mean square is correct to some percent.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import msgspec

from router.generation.metrics import TOKEN_BUCKETS

STRATA = 24
"""Number of points of equal weight. The last one is split into PARTS, since the tail matters
most."""
PARTS = 5
MAX_EDGES = 256
BEYOND = 4.0
"""Upper end of the last bucket, as a multiple of its lower edge."""

BOUNDS = (
    *(i / STRATA for i in range(STRATA)),
    *(1.0 - 0.5**k / STRATA for k in range(1, PARTS)),
    1.0,
)
"""Bounds of the strata and their parts, as shares of all values."""


class LengthHistogram(msgspec.Struct, frozen=True, array_like=True):
    """``counts``: values in each bucket, not cumulated, with one more than ``edges`` for the values
    above the last. A value at an edge belongs to the bucket below it. ``total``: the sum of all
    values."""

    edges: tuple[float, ...] = TOKEN_BUCKETS
    counts: tuple[float, ...] = (0.0,) * (len(TOKEN_BUCKETS) + 1)
    total: float = 0.0

    @classmethod
    def cumulated(cls, buckets: Sequence[tuple[float, float]], total: float) -> LengthHistogram:
        """Return a histogram from Prometheus buckets: (edge, values up to it) in ascending order,
        the last edge infinite. Invalid buckets give an empty histogram."""
        edges = tuple(edge for edge, _ in buckets[:-1])
        ups = [max(0.0, count) for _, count in buckets]
        usable = 0 < len(edges) <= MAX_EDGES and math.isinf(buckets[-1][0])
        if not usable or not all(0 < edge < math.inf for edge in edges):
            return cls()
        ups = list(accumulate(ups, max))  # each was read at another moment
        return cls(edges, tuple(b - a for a, b in pairwise([0.0, *ups])), max(0.0, total))

    @property
    def count(self) -> float:
        return math.fsum(self.counts)

    @property
    def mean(self) -> float:
        """The mean; 0 without values. It is clipped to what the buckets allow, because the sum may
        be of another moment, or garbage."""
        count = self.count
        if count <= 0:
            return 0.0
        least = math.fsum(low * n for low, _, n in self._buckets())
        most = math.fsum(high * n for _, high, n in self._buckets())
        return min(max(self.total, least), most) / count

    @property
    def middle_total(self) -> float:
        """The sum if each value were in the middle of its bucket."""
        return math.fsum((low + high) / 2 * n for low, high, n in self._buckets())

    @classmethod
    def together(cls, histograms: Iterable[LengthHistogram]) -> LengthHistogram:
        """Return the sum of histograms. Where edges differ (routers of two versions), those with
        most values count."""
        by_edges: dict[tuple[float, ...], list[LengthHistogram]] = {}
        for one in histograms:
            if any(one.counts):
                by_edges.setdefault(one.edges, []).append(one)
        sums = [
            cls(edges, tuple(map(math.fsum, zip(*(h.counts for h in of), strict=True))), total)
            for edges, of in by_edges.items()
            for total in [math.fsum(h.total for h in of)]
        ]
        return max(sums, key=lambda histogram: histogram.count, default=cls())

    def scaled(self, factor: float) -> LengthHistogram:
        """Return the histogram of ``factor`` times as many values."""
        counts = tuple(factor * count for count in self.counts)
        return LengthHistogram(self.edges, counts, factor * self.total)

    def points(self) -> tuple[float, ...]:
        """Return the mean between each two neighbours of BOUNDS in ascending order; nothing without
        values."""
        if self.count <= 0:
            return ()
        sums = [self._lowest(share * self.count) for share in BOUNDS]
        means = [
            (b - a) / (q - p)
            for (a, b), (p, q) in zip(pairwise(sums), pairwise(BOUNDS), strict=True)
        ]
        scale = self.mean * self.count / sums[-1]
        return tuple(scale * mean / self.count for mean in means)

    def _lowest(self, rank: float) -> float:
        """Return the sum of the ``rank`` lowest values."""
        left, found = rank, 0.0
        for low, high, n in self._buckets():
            taken = min(n, left)
            cut = low + (high - low) * taken / n
            found += taken * (low + cut) / 2
            left -= taken
            if left <= 0:
                break
        return found

    def _buckets(self) -> Iterator[tuple[float, float, float]]:
        """Yield lower edge, upper edge and count of each bucket that is not empty."""
        lows = (0.0, *self.edges)
        highs = (*self.edges, BEYOND * self.edges[-1])
        return (b for b in zip(lows, highs, self.counts, strict=True) if b[2] > 0)


def arriving_lengths(ended: LengthHistogram, passed: LengthHistogram) -> LengthHistogram:
    """Return the lengths of the values that begin now. ``ended``: those of the values that have
    ended, ``passed``: the edges that values have passed in the same time.

    While the load grows, values that began lately are many, and the short ones of them end first.
    But of the values that left a bucket, the share that ended there is the same at any time. The
    product of these shares is the distribution (Kaplan and Meier, "Nonparametric estimation from
    incomplete observations", 1958). No value is taken to be longer than the bucket behind the last
    one that any has left.
    """
    if passed.edges != ended.edges or not passed.count or not ended.count:
        return ended
    shares, left, last = [0.0] * len(ended.counts), 1.0, 0
    for i, (end, more) in enumerate(zip(ended.counts, passed.counts, strict=True)):
        if end + more > 0:  # of all values, the share ``left`` reaches this bucket
            shares[i], last = left * end / (end + more), i
            left -= shares[i]
    shares[min(last + 1, len(shares) - 1)] += left
    found = LengthHistogram(ended.edges, tuple(ended.count * share for share in shares))
    total = found.middle_total * ended.mean * ended.count / ended.middle_total
    return LengthHistogram(found.edges, found.counts, total)


class HistogramBuilder:
    """Counts values into a LengthHistogram."""

    def __init__(self, edges: Sequence[float] = TOKEN_BUCKETS) -> None:
        self._edges = tuple(edges)
        self.clear()

    def clear(self) -> None:
        self._counts = [0] * (len(self._edges) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._edges, value)] += 1
        self._total += value

    def histogram(self) -> LengthHistogram:
        return LengthHistogram(self._edges, tuple(map(float, self._counts)), self._total)
