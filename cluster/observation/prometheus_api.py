"""Reads the traffic from a Prometheus that scrapes the cluster as `baton monitoring` configures it.

There is one query for each reading, so that all of it is of one moment: increases over the window,
each with its own label, joined by ``or``. The API:
https://prometheus.io/docs/prometheus/latest/querying/api/

``increase`` needs two samples of a series: a burst is known only where Prometheus scrapes often
enough, and what a router counted before its first scrape is not known.

The window follows the variance of the traffic as in ``sliding_window.py``, but is window_s at
least: the next query is over as long a time as the last answer showed to be long enough, and where
that is longer than window_s, over none before a change.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Self

import aiohttp
import msgspec
from yarl import URL

from cluster.observation.arrival_history import ArrivalHistory
from cluster.observation.reading import (
    MAX_REQUEST_RATE,
    TrafficReading,
    is_plausible,
    plausible_queue,
)
from cluster.observation.request_lengths import LengthHistogram
from cluster.observation.request_mix import RunningMean, TrafficCounts, request_samples
from cluster.observation.router_pages import (
    ANSWERED,
    ARRIVALS,
    CACHED_PAIRS,
    ENDED,
    LENGTHS,
    NOT_FULL,
    OUTPUT_PAIRS,
    QUEUED,
    TIMES,
)
from cluster.observation.sliding_window import (
    BURST_INTERVALS,
    LONGEST,
    SHARE,
    has_changed,
    long_enough_s,
    observed_latency,
)
from cluster.sizing.burstiness import arrival_dispersion
from cluster.sizing.snapshot import Arrivals, RequestMix, RequestSample
from protocol.errors import StartupError, Unavailable
from protocol.registry.directory import RouterRecord
from protocol.security.listen_hosts import is_loopback
from router.overview.scraper import describe_error

DEADLINE_S = 3.0
MAX_ANSWER_BYTES = 1 << 20
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


def check_prometheus_url(url: str) -> URL:
    """Parse the URL. Raises StartupError for one that cannot be queried, without repeating it,
    because it may contain a password."""
    try:
        parsed = URL(url)
    except ValueError:
        parsed = URL()
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query_string:
        raise StartupError(
            "autoscaler.prometheus_url must be http[s]://[user:password@]host[:port][/prefix],"
            " the address of a Prometheus"
        )
    if parsed.password and parsed.scheme == "http" and not is_loopback(parsed.host):
        raise StartupError(
            "autoscaler.prometheus_url holds a password, which goes beyond this machine with"
            " https only"
        )
    return parsed


def build_query(cluster: str, window_s: float, burst_s: float, first_s: float) -> str:
    """Return the whole query as one PromQL expression. ``first_s``: for so long a router must have
    been scraped."""
    selector = f'{{cluster="{_quoted(cluster)}"}}'
    window, burst = (f"{selector}[{round(seconds * 1000)}ms]" for seconds in (window_s, burst_s))
    parts = {
        "age": f"time() - max(timestamp({ARRIVALS}{selector}))",
        "arrivals": f"sum(increase({ARRIVALS}{window}))",
        "burst": f"sum(increase({ARRIVALS}{burst}))",
        "begun": f"count({ARRIVALS}{selector} offset {round(first_s * 1000)}ms)",
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


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class PrometheusApi:
    """A ``TrafficSource``; use with ``async with``.

    User and password in ``url`` (see ``check_prometheus_url``) are sent as HTTP basic
    authentication. TLS trusts the CAs of this machine.
    """

    def __init__(self, url: URL, cluster: str, *, interval_s: float, window_s: float) -> None:
        self.stale_s = max(BURST_INTERVALS * interval_s, window_s / 2)
        self._api = url / "api/v1/query"
        self._cluster = cluster
        self._window_s, self._burst_s = window_s, BURST_INTERVALS * interval_s
        self._asked_s = window_s  # window of the next query
        self._alike_since_s: float | None = None  # monotonic; nothing before it is asked for
        self._samples: tuple[RequestSample, ...] = ()
        self._history = ArrivalHistory(self._burst_s)
        self._remembered_s = -math.inf  # time of the last of its counts
        self._client: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S))
        return self

    async def __aexit__(self, *gone: object) -> None:
        await self._client.close()

    async def read_traffic(self, routers: Sequence[RouterRecord]) -> TrafficReading:
        """Query once. Raises Unavailable. Prometheus knows the routers, so ``routers`` is not
        used."""
        window_s, now = self._asked_s, time.monotonic()
        query = build_query(self._cluster, window_s, self._burst_s, self._window_s)
        values = parse_answer(await self._query_api(query))
        if "arrivals" not in values:
            raise Unavailable(
                f"Prometheus has no {ARRIVALS} of cluster {self._cluster} over the last"
                f" {window_s:.0f} s: it must scrape it twice in that time, as `baton"
                " monitoring` sets it up"
            )
        if "begun" not in values:
            raise Unavailable(NOT_FULL)
        counted = traffic_counts(values, window_s)
        burst = _scalar(values, "burst") if "burst" in values else None
        if not is_plausible(counted) or not 0 <= (burst or 0) <= MAX_REQUEST_RATE * self._burst_s:
            raise Unavailable("what Prometheus has cannot be a router's")
        self._samples = request_samples(counted) or self._samples
        arrivals = counted.arrivals
        if self._alike_since_s is None:
            self._alike_since_s = now - self._window_s
        if burst is not None:
            is_new = self._remember(burst)
            parts = burst, max(0.0, arrivals - burst)
            seconds = self._burst_s, window_s - self._burst_s
            if has_changed(parts, arrival_dispersion(self._past(), 1), 1.0, seconds, 1):
                if is_new:
                    self._history.record_change(1)
                arrivals, window_s = burst, self._burst_s
                self._alike_since_s = now - self._burst_s
        self._asked_s = self._next_window_s(counted, now - self._alike_since_s)
        mix = RequestMix(
            rate=arrivals / window_s,
            window_s=window_s,
            samples=self._samples,
            backlog_tokens=plausible_queue(_scalar(values, "queued")),
            arrivals=self._past(),
        )
        observed = observed_latency(counted)
        return TrafficReading(mix, observed, time.monotonic() - max(0.0, _scalar(values, "age")))

    def _next_window_s(self, counted: TrafficCounts, alike_s: float) -> float:
        """Return a window that is long enough, after ``alike_s`` without a change."""
        most_s = min(LONGEST * self._window_s, alike_s)
        return max(self._window_s, min(most_s, long_enough_s(counted, self._samples)))

    def _past(self) -> Arrivals:
        return self._history.arrivals(self._burst_s)

    def _remember(self, arrivals: float) -> bool:
        """Add the arrivals of the last burst_s to the history, once in that time. Return whether
        they were added."""
        now = time.monotonic()
        if now - self._remembered_s > 2.0 * self._burst_s:
            self._history.clear()
        if now - self._remembered_s < SHARE * self._burst_s:
            return False
        self._history.add(arrivals)
        self._remembered_s = now
        return True

    async def _query_api(self, query: str) -> bytes:
        form = {"query": query, "timeout": f"{DEADLINE_S:g}s"}
        try:
            async with self._client.post(self._api, data=form, allow_redirects=False) as reply:
                if reply.status != 200:
                    raise Unavailable(f"Prometheus answers {reply.status}")
                return await _body(reply)
        except TimeoutError:
            raise Unavailable(f"Prometheus does not answer within {DEADLINE_S:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unavailable(f"Prometheus {describe_error(error)}") from None


async def _body(reply: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for part in reply.content.iter_any():
        body += part
        if len(body) > MAX_ANSWER_BYTES:
            raise Unavailable(f"Prometheus sends more than {MAX_ANSWER_BYTES >> 10} KiB")
    return bytes(body)


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
        return LengthHistogram.cumulated(_edged(values[name]), _scalar(values, f"{name}_sum"))

    def mean(name: str) -> RunningMean:
        return RunningMean(*(_scalar(values, f"{name}_{part}") for part in ("sum", "count")))

    return TrafficCounts(
        seconds=seconds,
        arrivals=_scalar(values, "arrivals"),
        answered_tokens=_scalar(values, "answered"),
        cached_pairs=_scalar(values, "pairs"),
        prompts=lengths("prompts"),
        uncached=lengths("uncached"),
        outputs=lengths("outputs"),
        ended_tokens=_scalar(values, "ended"),
        output_pairs=_scalar(values, "output_pairs"),
        ttft=mean("ttft"),
        tpot=mean("tpot"),
    )


def _edged(series: Sequence[tuple[str, float]]) -> list[tuple[float, float]]:
    try:
        return sorted((float(edge), count) for edge, count in series)
    except ValueError:
        return []


def _scalar(values: SeriesValues, name: str) -> float:
    """Return the part's value; 0 where there is none."""
    return values[name][0][1] if values.get(name) else 0.0
