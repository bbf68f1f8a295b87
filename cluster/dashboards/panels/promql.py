"""PromQL of panels. An expression knows what it is in, and which metrics it is made from.

All are right with any number of routers and workers: counters are summed as rates, quantiles are
taken of summed buckets, and what every router tells alike is taken once, by ``highest``. Where
nothing was asked for, a ratio has no value, rather than NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.dashboards.panels.catalog import Metric

WINDOW = "$__rate_interval"
"""At least four scrapes, by Grafana; the width of a pixel where that is more."""
RECENT = "5m"
"""Of single numbers: long enough not to jump with each request."""

PER_SECOND = {
    "requests": "reqps",
    "tokens": "si:tok/s",
    "bytes": "Bps",
    "flops": "flops",
    "seconds": "percentunit",
    "count": "suffix:/s",
}
"""Grafana's names of units, of rates."""
PLAIN = {
    "requests": "short",
    "tokens": "short",
    "bytes": "bytes",
    "seconds": "s",
    "ratio": "percentunit",
    "count": "short",
}


@dataclass(frozen=True)
class Expr:
    """``unit``: Grafana's name of it."""

    text: str
    unit: str
    uses: tuple[Metric, ...]

    def over(self, whole: Expr) -> Expr:
        """The share of ``whole``, which has the same labels."""
        return Expr(f"{self.text}\n/\n({whole.text} > 0)", "percentunit", (*self.uses, *whole.uses))

    def or_zero(self) -> Expr:
        """Where it has no labels, and may have no series."""
        return Expr(f"({self.text} or vector(0))", self.unit, self.uses)

    def within(self, unit: str) -> Expr:
        return Expr(self.text, unit, self.uses)


def series(metric: Metric, match: str = "", suffix: str = "") -> str:
    """Those of the clusters and models that were picked; ``match``: more matchers."""
    scope = 'cluster=~"$cluster"' if metric.bare else 'cluster=~"$cluster", model=~"$model"'
    return f"{metric.name}{suffix}{{{scope}{f', {match}' if match else ''}}}"


def rate(metric: Metric, *by: str, match: str = "", window: str = WINDOW) -> Expr:
    """Of a counter, per second, summed; seconds per second: a share of time."""
    assert metric.kind == "counter", metric
    text = _by("sum", by, f"rate({series(metric, match, '_total')}[{window}])")
    return Expr(text, PER_SECOND[metric.unit], (metric,))


def grown(metric: Metric, *by: str, match: str = "", window: str = WINDOW) -> Expr:
    """Of a counter, in the window."""
    assert metric.kind == "counter", metric
    text = _by("sum", by, f"increase({series(metric, match, '_total')}[{window}])")
    return Expr(text, PLAIN[metric.unit], (metric,))


def total(metric: Metric, *by: str, match: str = "") -> Expr:
    """Of a gauge that adds up."""
    return _gauge("sum", metric, by, match)


def highest(metric: Metric, *by: str, match: str = "") -> Expr:
    return _gauge("max", metric, by, match)


def mean(metric: Metric, *by: str, match: str = "") -> Expr:
    """Of a histogram's observations."""
    assert metric.kind == "histogram", metric
    summed, counted = (
        _by("sum", by, f"rate({series(metric, match, suffix)}[{WINDOW}])")
        for suffix in ("_sum", "_count")
    )
    return Expr(f"{summed}\n/\n({counted} > 0)", PLAIN[metric.unit], (metric,))


def quantile(q: float, metric: Metric, *by: str, match: str = "", window: str = WINDOW) -> Expr:
    """Of a histogram's observations; linear within a bucket."""
    assert metric.kind == "histogram" and 0 < q < 1, (metric, q)
    buckets = _by("sum", (*by, "le"), f"rate({series(metric, match, '_bucket')}[{window}])")
    return Expr(f"histogram_quantile({q}, {buckets}) >= 0", PLAIN[metric.unit], (metric,))


def heat(metric: Metric, match: str = "") -> Expr:
    """A histogram's observations in each bucket, for a heat map."""
    assert metric.kind == "histogram", metric
    text = _by("sum", ("le",), f"increase({series(metric, match, '_bucket')}[{WINDOW}])")
    return Expr(text, "short", (metric,))


def _gauge(how: str, metric: Metric, by: tuple[str, ...], match: str) -> Expr:
    assert metric.kind == "gauge", metric
    return Expr(_by(how, by, series(metric, match)), PLAIN[metric.unit], (metric,))


def _by(how: str, by: tuple[str, ...], text: str) -> str:
    return f"{how} by ({', '.join(by)}) ({text})" if by else f"{how}({text})"
