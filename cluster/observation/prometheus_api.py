"""Requests counted by a Prometheus that scrapes the cluster as `baton monitoring` sets it up.

One query a look, so that all of it is of one moment: increases over the window, each under a name
of its own, joined by ``or``. The API: https://prometheus.io/docs/prometheus/latest/querying/api/

``increase`` needs two samples of a series: a burst is known where Prometheus scrapes often enough,
and what a router counted before its first scrape is not.
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

from cluster.observation.reading import MOST_PER_S, Look, sane
from cluster.observation.request_lengths import Histogram
from cluster.observation.request_mix import Counted, Mean, samples
from cluster.observation.router_pages import ANSWERED, ARRIVALS, LENGTHS, TIMES
from cluster.observation.sliding_window import BURST_LOOKS
from cluster.sizing.snapshot import Mix, Observed, Sample
from protocol.errors import StartupError, Unavailable
from protocol.registry.directory import RouterRecord
from protocol.security.cluster_token import is_loopback
from router.overview.metrics_pages import why

DEADLINE_S = 3.0
MOST_BYTES = 1 << 20
_NAME = "asked"  # the label that tells the parts of the answer apart


class _Series(msgspec.Struct):
    metric: dict[str, str]
    value: tuple[float, str]


class _Data(msgspec.Struct):
    result: list[_Series] = []


class _Answer(msgspec.Struct):
    status: str
    data: _Data = msgspec.field(default_factory=_Data)


Values = dict[str, list[tuple[str, float]]]
"""By the name of what was asked: (its edge, where it has one; value)."""


def checked(url: str) -> URL:
    """Raises StartupError for a URL that cannot be asked. It is not repeated: it may hold a
    password."""
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


def query(cluster: str, window_s: float, burst_s: float) -> str:
    """All that is asked, as one expression."""
    of = f'{{cluster="{_quoted(cluster)}"}}'
    window, burst = (f"{of}[{round(seconds * 1000)}ms]" for seconds in (window_s, burst_s))
    parts = {
        "age": f"time() - max(timestamp({ARRIVALS}{of}))",
        "arrivals": f"sum(increase({ARRIVALS}{window}))",
        "burst": f"sum(increase({ARRIVALS}{burst}))",
        "answered": f"sum(increase({ANSWERED}{window}))",
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
    """``async with``. ``url``: as ``checked``; user and password in it are sent as HTTP basic
    authentication. Certificates are believed as this machine's CAs say."""

    def __init__(self, url: URL, cluster: str, *, interval_s: float, window_s: float) -> None:
        self.stale_s = max(BURST_LOOKS * interval_s, window_s / 2)
        self._api = url / "api/v1/query"
        self._cluster = cluster
        self._window_s, self._burst_s = window_s, BURST_LOOKS * interval_s
        self._query = query(cluster, window_s, self._burst_s)
        self._samples: tuple[Sample, ...] = ()
        self._client: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S))
        return self

    async def __aexit__(self, *gone: object) -> None:
        await self._client.close()

    async def look(self, routers: Sequence[RouterRecord]) -> Look:
        """Raises Unavailable. Who the routers are, Prometheus knows."""
        values = parsed(await self._ask())
        if "arrivals" not in values:
            raise Unavailable(
                f"Prometheus has no {ARRIVALS} of cluster {self._cluster} over the last"
                f" {self._window_s:g} s: it must scrape it twice in that time, as `baton"
                " monitoring` sets it up"
            )
        counted = counts(values, self._window_s)
        burst = _one(values, "burst")
        if not sane(counted) or not 0 <= burst <= MOST_PER_S * self._burst_s:
            raise Unavailable("what Prometheus has cannot be a router's")
        self._samples = samples(counted) or self._samples
        mix = Mix(
            rate=counted.arrivals / self._window_s,
            window_s=self._window_s,
            samples=self._samples,
            burst_rate=burst / self._burst_s,
            burst_s=self._burst_s if "burst" in values else 0.0,
        )
        observed = Observed(ttft_s=counted.ttft.value, tpot_s=counted.tpot.value)
        return Look(mix, observed, time.monotonic() - max(0.0, _one(values, "age")))

    async def _ask(self) -> bytes:
        form = {"query": self._query, "timeout": f"{DEADLINE_S:g}s"}
        try:
            async with self._client.post(self._api, data=form, allow_redirects=False) as reply:
                if reply.status != 200:
                    raise Unavailable(f"Prometheus answers {reply.status}")
                return await _body(reply)
        except TimeoutError:
            raise Unavailable(f"Prometheus does not answer within {DEADLINE_S:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unavailable(f"Prometheus {why(error)}") from None


async def _body(reply: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for part in reply.content.iter_any():
        body += part
        if len(body) > MOST_BYTES:
            raise Unavailable(f"Prometheus sends more than {MOST_BYTES >> 10} KiB")
    return bytes(body)


def parsed(body: bytes) -> Values:
    """Raises Unavailable for what is no answer to a query. What is no finite number is left out."""
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Unavailable("what Prometheus says is no answer to a query") from None
    if answer.status != "success":
        raise Unavailable("Prometheus could not evaluate a query")
    found: Values = defaultdict(list)
    for series in answer.data.result:
        try:
            value = float(series.value[1])
        except ValueError:
            continue
        if math.isfinite(value):
            found[series.metric.get(_NAME, "")].append((series.metric.get("le", ""), value))
    return found


def counts(values: Values, seconds: float) -> Counted:
    def lengths(name: str) -> Histogram:
        return Histogram.cumulated(_edged(values[name]), _one(values, f"{name}_sum"))

    def mean(name: str) -> Mean:
        return Mean(*(_one(values, f"{name}_{part}") for part in ("sum", "count")))

    return Counted(
        seconds=seconds,
        arrivals=_one(values, "arrivals"),
        answered_tokens=_one(values, "answered"),
        prompts=lengths("prompts"),
        uncached=lengths("uncached"),
        outputs=lengths("outputs"),
        ttft=mean("ttft"),
        tpot=mean("tpot"),
    )


def _edged(series: Sequence[tuple[str, float]]) -> list[tuple[float, float]]:
    try:
        return sorted((float(edge), count) for edge, count in series)
    except ValueError:
        return []


def _one(values: Values, name: str) -> float:
    """0 where there is none."""
    return values[name][0][1] if values.get(name) else 0.0
