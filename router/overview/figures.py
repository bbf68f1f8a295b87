"""The arithmetic of an overview, over Prometheus pages: sums, rates, quantiles. Pure.

page text --parse--> Page (one process, one moment)
two moments of all processes --> Window: what happened between them, or since the start
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from prometheus_client.parser import text_string_to_metric_families

Buckets: TypeAlias = list[tuple[float, float]]
"""(upper edge, observations up to it), ascending; the last edge is infinite."""


class Sample(NamedTuple):
    labels: Mapping[str, str]
    value: float


Page: TypeAlias = dict[str, list[Sample]]
"""The samples of one process by name."""


BUCKETS = (
    "baton_time_to_first_token_seconds",
    "baton_request_time_per_output_token_seconds",
    "baton_inter_token_latency_seconds",
)
"""Histograms whose quantiles are shown; of others the mean is."""


def slim(text: str) -> str:
    """A page without most of what no overview needs: that is cheap, and parsing is not."""
    lines = text.split("\n")  # and at nothing else: labels may hold what splitlines() splits at
    return "\n".join(
        line
        for line in lines
        if not line.startswith("# ") and ("_bucket{" not in line or line.startswith(BUCKETS))
    )


def parse(text: str) -> Page:
    """Without samples that no process of ours would have. Raises ValueError for what is no
    Prometheus page."""
    page: Page = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found = Sample(sample.labels, sample.value)
            if _sane(sample.name, found):
                page.setdefault(sample.name, []).append(found)
    return page


def _sane(name: str, sample: Sample) -> bool:
    """Its sums are finite, too, and a bucket has an edge."""
    if not abs(sample.value) <= _LARGEST:  # nor for NaN
        return False
    try:
        return not name.endswith("_bucket") or not math.isnan(float(sample.labels.get("le", "")))
    except ValueError:
        return False


_LARGEST = 1e30


def whole(value: float) -> int:
    """As an integer that JSON takes everywhere (RFC 8259, section 6)."""
    return round(min(max(value, 0.0), 2.0**53))


@dataclass(frozen=True)
class Moment:
    """The pages of all processes, by target, as they were at ``at`` (seconds, monotonic)."""

    at: float
    pages: Mapping[str, Page] = field(default_factory=dict)


def matching(page: Page, name: str, labels: Mapping[str, str]) -> Iterator[Sample]:
    for sample in page.get(name, ()):
        if labels.items() <= sample.labels.items():
            yield sample


def gauge(page: Page, name: str, **labels: str) -> float:
    """The sum of its series; 0 where there is none."""
    return sum(sample.value for sample in matching(page, name, labels))


class Window:
    """What happened between two moments; ``before`` None: since each process started.

    A counter that is lower than before belongs to a process that started anew: all of it counts.
    """

    def __init__(self, now: Moment, before: Moment | None) -> None:
        self._now = now
        self._before = before

    @property
    def seconds(self) -> float | None:
        """None: since the start."""
        return None if self._before is None else self._now.at - self._before.at

    def count(self, targets: Iterable[str], name: str, **labels: str) -> float:
        """The increase of a counter, over all its series at these targets."""
        found = self._increases(targets, name, labels)
        return math.fsum(increase for _, increase in found)

    def rate(self, targets: Iterable[str], name: str, **labels: str) -> float | None:
        """Per second; None since the start, which is not the same for all."""
        if not self.seconds:
            return None
        return self.count(targets, name, **labels) / self.seconds

    def by(self, targets: Iterable[str], name: str, label: str) -> dict[str, float]:
        """The increase of a counter by one of its labels."""
        found: dict[str, float] = {}
        for labels, increase in self._increases(targets, name, {}):
            value = labels.get(label, "")
            found[value] = found.get(value, 0.0) + increase
        return found

    def ratio(self, targets: list[str], part: str, whole: str) -> float | None:
        """Of two counters; None where nothing was counted."""
        of = self.count(targets, whole)
        return self.count(targets, part) / of if of else None

    def mean(self, targets: list[str], name: str, **labels: str) -> float | None:
        """Of a histogram's observations."""
        count = self.count(targets, f"{name}_count", **labels)
        return self.count(targets, f"{name}_sum", **labels) / count if count else None

    def buckets(self, targets: Iterable[str], name: str, **labels: str) -> Buckets:
        found: dict[float, float] = {}
        for of, increase in self._increases(targets, f"{name}_bucket", labels):
            edge = float(of["le"])
            found[edge] = found.get(edge, 0.0) + increase
        return sorted(found.items())

    def _increases(
        self, targets: Iterable[str], name: str, labels: Mapping[str, str]
    ) -> Iterator[tuple[Mapping[str, str], float]]:
        for target in targets:
            old = {} if self._before is None else self._before.pages.get(target, {})
            known = {tuple(sorted(s.labels.items())): s.value for s in matching(old, name, labels)}
            for sample in matching(self._now.pages.get(target, {}), name, labels):
                last = known.get(tuple(sorted(sample.labels.items())), 0.0)
                restarted = sample.value < last
                yield sample.labels, sample.value - (0.0 if restarted else last)


def quantile(buckets: Buckets, q: float) -> float | None:
    """The ``q`` quantile (0..1) of a histogram; None where it is empty. Linear within a bucket,
    from 0 in the first one; above the last finite edge it is that edge. As Prometheus'
    ``histogram_quantile``."""
    total = buckets[-1][1] if buckets else 0.0
    if not total:
        return None
    rank, lower, below = q * total, 0.0, 0.0
    for edge, count in buckets:
        if count >= rank and count > below:
            if math.isinf(edge):
                return lower
            return lower + (edge - lower) * (rank - below) / (count - below)
        lower, below = (lower if math.isinf(edge) else edge), count
    return lower
