"""Builds the PromQL of panels. An expression knows its unit and the metrics that it uses.

All expressions work with any number of routers and workers: counters are summed as rates, quantiles
are computed from summed buckets, and a value that every router exports is taken once, by
``max_of``. Without requests a ratio has no value, rather than NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.dashboards.panels.catalog import Metric

WINDOW = "$__rate_interval"
"""Grafana replaces it by at least four scrape intervals, or by the time of a pixel if longer."""
RECENT = "5m"
"""Window of single numbers, long enough that they do not jump with each request."""

PER_SECOND = {
    "requests": "reqps",
    "tokens": "si:tok/s",
    "bytes": "Bps",
    "flops": "flops",
    "seconds": "percentunit",
    "count": "suffix:/s",
}
"""Grafana's units of rates."""
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
    """A PromQL expression. ``unit`` is Grafana's name of its unit, ``uses`` are its metrics."""

    text: str
    unit: str
    uses: tuple[Metric, ...]

    def over(self, whole: Expr) -> Expr:
        """Return the share of ``whole``, which must have the same labels."""
        return Expr(f"{self.text}\n/\n({whole.text} > 0)", "percentunit", (*self.uses, *whole.uses))

    def or_zero(self) -> Expr:
        """Return 0 where an expression without labels has no series."""
        return Expr(f"({self.text} or vector(0))", self.unit, self.uses)

    def with_unit(self, unit: str) -> Expr:
        return Expr(self.text, unit, self.uses)

    def wrapped(self, before: str = "", after: str = "") -> Expr:
        return Expr(f"{before}{self.text}{after}", self.unit, self.uses)


def series(metric: Metric, match: str = "", suffix: str = "") -> str:
    """Return the selector for the chosen clusters and models; ``match`` adds matchers."""
    scope = 'cluster=~"$cluster"' if metric.bare else 'cluster=~"$cluster", model=~"$model"'
    return f"{metric.name}{suffix}{{{scope}{f', {match}' if match else ''}}}"


def rate(metric: Metric, *by: str, match: str = "", window: str = WINDOW) -> Expr:
    """Return a counter's summed rate per second; a rate of seconds is a share of time."""
    assert metric.kind == "counter", metric
    text = _by("sum", by, f"rate({series(metric, match, '_total')}[{window}])")
    return Expr(text, PER_SECOND[metric.unit], (metric,))


def increase(metric: Metric, *by: str, match: str = "", window: str = WINDOW) -> Expr:
    """Return a counter's summed increase in the window."""
    assert metric.kind == "counter", metric
    text = _by("sum", by, f"increase({series(metric, match, '_total')}[{window}])")
    return Expr(text, PLAIN[metric.unit], (metric,))


def sum_of(metric: Metric, *by: str, match: str = "") -> Expr:
    """Return the sum of a gauge."""
    return _gauge("sum", metric, by, match)


def max_of(metric: Metric, *by: str, match: str = "") -> Expr:
    """Return the maximum of a gauge."""
    return _gauge("max", metric, by, match)


def mean(metric: Metric, *by: str, match: str = "") -> Expr:
    """Return the mean of a histogram's observations."""
    assert metric.kind == "histogram", metric
    summed, counted = (
        _by("sum", by, f"rate({series(metric, match, suffix)}[{WINDOW}])")
        for suffix in ("_sum", "_count")
    )
    return Expr(f"{summed}\n/\n({counted} > 0)", PLAIN[metric.unit], (metric,))


def quantile(q: float, metric: Metric, *by: str, match: str = "", window: str = WINDOW) -> Expr:
    """Return a quantile of a histogram's observations, linear within a bucket."""
    assert metric.kind == "histogram" and 0 < q < 1, (metric, q)
    buckets = _by("sum", (*by, "le"), f"rate({series(metric, match, '_bucket')}[{window}])")
    return Expr(f"histogram_quantile({q}, {buckets}) >= 0", PLAIN[metric.unit], (metric,))


def bucket_increase(metric: Metric, match: str = "") -> Expr:
    """Return a histogram's observations in each bucket, for a heat map."""
    assert metric.kind == "histogram", metric
    text = _by("sum", ("le",), f"increase({series(metric, match, '_bucket')}[{WINDOW}])")
    return Expr(text, "short", (metric,))


def _gauge(how: str, metric: Metric, by: tuple[str, ...], match: str) -> Expr:
    assert metric.kind == "gauge", metric
    return Expr(_by(how, by, series(metric, match)), PLAIN[metric.unit], (metric,))


def _by(how: str, by: tuple[str, ...], text: str) -> str:
    return f"{how} by ({', '.join(by)}) ({text})" if by else f"{how}({text})"
