"""Reads the traffic from a Prometheus that scrapes the cluster as `baton monitoring` configures it.

``increase`` needs two samples of a series: a burst is known only where Prometheus scrapes often
enough, and what a router counted before its first scrape is not known.

The window follows the variance of the traffic as in ``sliding_window.py``: the next query is over
as long a time as the last answer showed to be long enough, and over window_s at least. Nothing
before a change is asked for, so that the window is shorter than window_s for a while after one.

Where Prometheus scraped for a part of a window only, ``increase`` counts the requests of that part.
So there is no reading while the last window_s have a gap: a time without a sample that is longer
than BURST_INTERVALS usual scrapes (burst_s at least, stale_s at most). After burst_s without a
reading the window is window_s, because a gap or a change before that was not seen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Self

import aiohttp
from yarl import URL

from cluster.observation.arrival_history import ArrivalHistory
from cluster.observation.prometheus_query import (
    SeriesValues,
    build_query,
    parse_answer,
    scalar,
    traffic_counts,
)
from cluster.observation.reading import (
    MAX_REQUEST_RATE,
    TrafficReading,
    is_plausible,
    plausible_queue,
)
from cluster.observation.request_mix import TrafficCounts, request_samples
from cluster.observation.router_pages import ARRIVALS
from cluster.observation.sliding_window import (
    BURST_INTERVALS,
    LEAST,
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
        self._needed_s = window_s  # shown by the last answer to be long enough
        self._alike_since_s = -math.inf  # monotonic; nothing before it is asked for
        self._read_s = -math.inf  # monotonic, of the last reading; -inf: none since a gap
        self._gap_s = self.stale_s  # a longer time without a sample is a gap
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
        now = time.monotonic()
        window_s = self._choose_window_s(now)
        query = build_query(
            self._cluster,
            window_s,
            self._burst_s,
            first_s=self._window_s,
            gap_s=self._gap_s,
            stale_s=self.stale_s,
        )
        values = parse_answer(await self._query_api(query))
        self._check_coverage(values, window_s)
        counted = traffic_counts(values, window_s)
        burst = scalar(values, "burst") if "burst" in values else None
        if not is_plausible(counted) or not 0 <= (burst or 0) <= MAX_REQUEST_RATE * self._burst_s:
            raise Unavailable("what Prometheus has cannot be a router's")
        self._read_s = now
        if window_s >= SHARE * self._window_s or _has_enough(counted):
            self._samples = request_samples(counted) or self._samples
        arrivals = counted.arrivals
        if burst is not None:
            is_new = self._remember(burst)
            parts = burst, max(0.0, arrivals - burst)
            seconds = self._burst_s, window_s - self._burst_s
            if has_changed(parts, arrival_dispersion(self._past(), 1), 1.0, seconds, 1):
                if is_new:
                    self._history.record_change(1)
                arrivals, window_s = burst, self._burst_s
                self._alike_since_s = now - self._burst_s
        self._needed_s = long_enough_s(counted, self._samples)
        mix = RequestMix(
            rate=arrivals / window_s,
            window_s=window_s,
            samples=self._samples,
            backlog_tokens=plausible_queue(scalar(values, "queued")),
            arrivals=self._past(),
        )
        observed = observed_latency(counted)
        return TrafficReading(mix, observed, time.monotonic() - max(0.0, scalar(values, "age")))

    def _choose_window_s(self, now: float) -> float:
        """Return a window that is long enough, or else reaches back to the last change or gap."""
        if now - self._read_s > self._burst_s:
            self._alike_since_s = max(self._alike_since_s, now - self._window_s)
        most_s = min(LONGEST * self._window_s, now - self._alike_since_s)
        return round(min(most_s, max(self._window_s, self._needed_s)), 3)  # milliseconds, as asked

    def _check_coverage(self, values: SeriesValues, window_s: float) -> None:
        """Raise Unavailable unless Prometheus has scraped throughout the window."""
        if "arrivals" not in values:
            raise Unavailable(
                f"Prometheus has no {ARRIVALS} of cluster {self._cluster} over the last"
                f" {window_s:.0f} s: it must scrape it twice in that time, as `baton"
                " monitoring` sets it up"
            )
        gap_s = self._gap_s
        if "scrapes" in values:
            usual_s = self.stale_s / max(1.0, scalar(values, "scrapes"))
            self._gap_s = min(self.stale_s, max(self._burst_s, BURST_INTERVALS * usual_s))
        if "gap" in values:
            self._read_s = -math.inf
            raise Unavailable(
                f"Prometheus did not scrape cluster {self._cluster} for more than"
                f" {gap_s:.0f} s, and the first window after that is not full"
            )
        if "age" not in values:
            raise Unavailable("Prometheus reached no router when it scraped last")

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


def _has_enough(counted: TrafficCounts) -> bool:
    """Return whether there are enough lengths of each kind for a window after a change. A change is
    one of the arrivals, so that until then the lengths before it are more accurate."""
    return min(h.count for h in (counted.prompts, counted.uncached, counted.outputs)) >= LEAST
