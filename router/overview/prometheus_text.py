"""Prometheus pages as values: parsing within limits, lookup of samples, histogram quantiles.

page text --read_page--> MetricsPage (one process) --RateWindow (rates.py)--> increases --> quantile
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from prometheus_client.parser import text_string_to_metric_families

Buckets: TypeAlias = list[tuple[float, float]]
"""(upper edge, observations up to it), ascending; the last edge is infinite."""

QUANTILE_HISTOGRAMS = (
    "baton_time_to_first_token_seconds",
    "baton_request_time_per_output_token_seconds",
    "baton_inter_token_latency_seconds",
)
"""Histograms whose quantiles are shown; of the others only the mean."""

MAX_LINES = 4096
MAX_SAMPLES = 2048
"""Baton's pages have 500 lines and 200 samples. The samples stay in memory for a window."""
MAX_LINE_CHARS = 1024
"""The time to parse a line grows faster than its length."""
SLICE_CHARS = 1024
"""Characters parsed without a break: at most 2 ms, even for hostile text."""

_MAX_VALUE = 1e30


class PrometheusSample(NamedTuple):
    """One series of a metric at one moment."""

    labels: Mapping[str, str]
    value: float


MetricsPage: TypeAlias = dict[str, list[PrometheusSample]]
"""The samples of one process by metric name."""


@dataclass(frozen=True)
class MetricsSnapshot:
    """The pages of all processes, by target, at one moment.

    ``silent``: targets without a page; ``later``: times of the pages that are younger than ``at``.
    """

    at: float  # seconds, monotonic
    pages: Mapping[str, MetricsPage] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()
    later: Mapping[str, float] = field(default_factory=dict)


def drop_unused_lines(text: str) -> str:
    """Drop most lines that no overview needs: dropping is cheap, parsing is not."""
    lines = text.split("\n")  # and at nothing else: labels may hold what splitlines() splits at
    return "\n".join(
        line
        for line in lines
        if not line.startswith("# ")
        and ("_bucket{" not in line or line.startswith(QUANTILE_HISTOGRAMS))
    )


async def read_page(body: bytes, slim: Callable[[str], str] = drop_unused_lines) -> MetricsPage:
    """Parse a page from the network on an event loop that streams run on.

    ``slim`` drops the lines that are not needed. The text is parsed in slices of SLICE_CHARS, and
    other tasks run in between. Raises ValueError for text that is not a page of Baton.
    """
    if body.count(b"\n") > MAX_LINES:
        raise ValueError(f"more than {MAX_LINES} lines")
    text = slim(body.decode(errors="replace"))
    page: MetricsPage = {}
    for part in _slices(text.split("\n")):
        for name, samples in parse_page(part).items():
            page.setdefault(name, []).extend(samples)
        await asyncio.sleep(0)
    return page


def _slices(lines: list[str]) -> Iterator[str]:
    """Raise ValueError where lines are too many or too long."""
    if len(lines) > MAX_SAMPLES + 1:  # the last one is empty
        raise ValueError(f"more than {MAX_SAMPLES} samples")
    part, size = list[str](), 0
    for line in lines:
        if len(line) > MAX_LINE_CHARS:
            raise ValueError(f"a line of more than {MAX_LINE_CHARS} characters")
        if part and size + len(line) >= SLICE_CHARS:
            yield "\n".join(part)
            part, size = [], 0
        part.append(line)
        size += len(line) + 1
    yield "\n".join(part)


def parse_page(text: str) -> MetricsPage:
    """Parse Prometheus text, without samples that no Baton process has. Raises ValueError."""
    page: MetricsPage = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found = PrometheusSample(sample.labels, sample.value)
            if _sane(sample.name, found):
                page.setdefault(sample.name, []).append(found)
    return page


def _sane(name: str, sample: PrometheusSample) -> bool:
    """Return whether sums of such values are finite, and a bucket has an edge."""
    if not abs(sample.value) <= _MAX_VALUE:  # false for NaN, too
        return False
    try:
        return not name.endswith("_bucket") or not math.isnan(float(sample.labels.get("le", "")))
    except ValueError:
        return False


def to_count(value: float) -> int:
    """Round to an integer that all JSON parsers accept (RFC 8259, section 6)."""
    return round(min(max(value, 0.0), 2.0**53))


def matching_samples(
    page: MetricsPage, name: str, labels: Mapping[str, str]
) -> Iterator[PrometheusSample]:
    for sample in page.get(name, ()):
        if labels.items() <= sample.labels.items():
            yield sample


def sum_samples(page: MetricsPage, name: str, **labels: str) -> float:
    """Return the sum of the series with these labels; 0 where there is none."""
    return sum(sample.value for sample in matching_samples(page, name, labels))


def histogram_quantile(buckets: Buckets, q: float) -> float | None:
    """Return the ``q`` quantile (0..1) of a histogram; None where it is empty. Like Prometheus'
    ``histogram_quantile``: linear within a bucket, from 0 in the first one, and at most the last
    finite edge."""
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
