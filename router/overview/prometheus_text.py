"""The arithmetic of an overview, over Prometheus pages: sums, rates, quantiles. Pure.

page text --parse--> Page (one process, one moment) --window.py--> what happened --> quantile
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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
    """The pages of all processes, by target, as they were at ``at`` (seconds, monotonic).

    ``silent``: who was there, and showed none. ``later``: of pages that are younger, their time.
    """

    at: float
    pages: Mapping[str, Page] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()
    later: Mapping[str, float] = field(default_factory=dict)


def matching(page: Page, name: str, labels: Mapping[str, str]) -> Iterator[Sample]:
    for sample in page.get(name, ()):
        if labels.items() <= sample.labels.items():
            yield sample


def gauge(page: Page, name: str, **labels: str) -> float:
    """The sum of its series; 0 where there is none."""
    return sum(sample.value for sample in matching(page, name, labels))


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
