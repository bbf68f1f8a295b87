"""The query about the traffic in PromQL, and what Prometheus answers. Pure.

There is one query for each reading, so that all of it is of one moment: increases over the window,
each with its own label, joined by ``or``. The API:
https://prometheus.io/docs/prometheus/latest/querying/api/
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from cluster.observation.request_lengths import LengthHistogram
from cluster.observation.request_mix import RunningMean, TrafficCounts
from cluster.observation.router_pages import (
    ANSWERED,
    ARRIVALS,
    CACHED_PAIRS,
    ENDED,
    LENGTHS,
    OUTPUT_PAIRS,
    QUEUED,
    TIMES,
)
from cluster.observation.sliding_window import BURST_INTERVALS
from protocol.errors import Unavailable

_NAME = "asked"  # label that distinguishes the parts of the answer


class _Series(msgspec.Struct):
    metric: dict[str, str]
    value: tuple[float, str]


class _Data(msgspec.Struct):
    result: list[_Series] = []


class _QueryResult(msgspec.Struct):
    status: str
    data: _Data = msgspec.field(default_factory=_Data)


SeriesValues = dict[str, list[tuple[str, float]]]
"""By the label of the query's part: (bucket edge, if it has one; value)."""


def build_query(
    cluster: str, window_s: float, burst_s: float, *, first_s: float, gap_s: float, stale_s: float
) -> str:
    """Return the whole query as one PromQL expression. Its part ``gap`` is 1 if at any time of the
    last ``first_s`` no router has had a sample for ``gap_s``; otherwise it is absent. ``scrapes``
    is the largest number of samples of one router within ``stale_s`` in the same time."""
    selector = f'{{cluster="{_quoted(cluster)}"}}'
    window, burst, gap, stale = (
        f"{selector}[{_milliseconds(seconds)}]" for seconds in (window_s, burst_s, gap_s, stale_s)
    )
    times = f"[{_milliseconds(first_s)}:{_milliseconds(burst_s / BURST_INTERVALS)}]"
    parts = {
        "age": f"time() - max(timestamp({ARRIVALS}{selector}))",
        "arrivals": f"sum(increase({ARRIVALS}{window}))",
        "burst": f"sum(increase({ARRIVALS}{burst}))",
        "gap": f"max(max_over_time(absent_over_time({ARRIVALS}{gap}){times}))",
        "scrapes": f"max(max_over_time(count_over_time({ARRIVALS}{stale}){times}))",
        "answered": f"sum(increase({ANSWERED}{window}))",
        "pairs": f"sum(increase({CACHED_PAIRS}{window}))",
        "ended": f"sum(increase({ENDED}{window}))",
        "output_pairs": f"sum(increase({OUTPUT_PAIRS}{window}))",
        "queued": f"sum({QUEUED}{selector})",
    }
    for name, metric in LENGTHS.items():
        parts[name] = f"sum by (le) (increase({metric}_bucket{window}))"
        parts[f"{name}_sum"] = f"sum(increase({metric}_sum{window}))"
    for name, metric in TIMES.items():
        for part in ("sum", "count"):
            parts[f"{name}_{part}"] = f"sum(increase({metric}_{part}{window}))"
    named = (f'label_replace({expr}, "{_NAME}", "{name}", "", "")' for name, expr in parts.items())
    return " or ".join(named)


def _milliseconds(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def parse_answer(body: bytes) -> SeriesValues:
    """Parse a reply, without values that are not finite. Raises Unavailable for anything else than
    a query result."""
    try:
        answer = msgspec.json.decode(body, type=_QueryResult)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Unavailable("what Prometheus says is no answer to a query") from None
    if answer.status != "success":
        raise Unavailable("Prometheus could not evaluate a query")
    found: SeriesValues = defaultdict(list)
    for series in answer.data.result:
        try:
            value = float(series.value[1])
        except ValueError:
            continue
        if math.isfinite(value):
            found[series.metric.get(_NAME, "")].append((series.metric.get("le", ""), value))
    return found


def traffic_counts(values: SeriesValues, seconds: float) -> TrafficCounts:
    def lengths(name: str) -> LengthHistogram:
        return LengthHistogram.cumulated(_edged(values[name]), scalar(values, f"{name}_sum"))

    def mean(name: str) -> RunningMean:
        return RunningMean(*(scalar(values, f"{name}_{part}") for part in ("sum", "count")))

    return TrafficCounts(
        seconds=seconds,
        arrivals=scalar(values, "arrivals"),
        answered_tokens=scalar(values, "answered"),
        cached_pairs=scalar(values, "pairs"),
        prompts=lengths("prompts"),
        uncached=lengths("uncached"),
        passed=lengths("passed"),
        outputs=lengths("outputs"),
        ended_tokens=scalar(values, "ended"),
        output_pairs=scalar(values, "output_pairs"),
        ttft=mean("ttft"),
        tpot=mean("tpot"),
    )


def _edged(series: Sequence[tuple[str, float]]) -> list[tuple[float, float]]:
    try:
        return sorted((float(edge), count) for edge, count in series)
    except ValueError:
        return []


def scalar(values: SeriesValues, name: str) -> float:
    """Return the part's value; 0 where there is none."""
    return values[name][0][1] if values.get(name) else 0.0
