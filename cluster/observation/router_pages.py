"""Counts requests from the routers' own metrics pages.

routers (directory) --/metrics, all at once--> increases of each --sum--> SlidingWindow --> reading

A router that does not answer is not missed for a while: its next page has what came meanwhile.
After ``stale_s`` the routers that answer are taken to represent it, interval by interval, and when
it answers again, it is as one that is seen for the first time. What a router had counted before
that, or after the last page of one that is gone, is not known.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import msgspec
from msgspec.structs import replace

from cluster.observation.reading import TrafficReading, is_plausible, plausible_queue
from cluster.observation.request_lengths import LengthHistogram
from cluster.observation.request_mix import RunningMean, TrafficCounts
from cluster.observation.sliding_window import BURST_INTERVALS, SlidingWindow
from protocol.errors import Unavailable
from protocol.registry.directory import RouterRecord
from protocol.security.tls import TlsFiles
from router.http.service_discovery import target_groups
from router.overview.cluster_scraper import MetricsTls
from router.overview.prometheus_text import MetricsPage, MetricsSnapshot, sum_samples
from router.overview.rates import RateWindow
from router.overview.scraper import MetricsScraper, ScrapeLimits, ScrapeResult, TargetGroup

log = logging.getLogger("baton.autoscaler")

NOT_FULL = "requests are counted from now on, and the first window is not full"
LIMITS = ScrapeLimits(deadline_s=2.0, size=1 << 20)
MAX_ROUTERS = 1024
ARRIVALS = "baton_requests_received_total"
ANSWERED = "baton_prompt_tokens_total"
CACHED_PAIRS = "baton_prompt_cached_pairs_total"
ENDED = "baton_ended_prompt_tokens_total"
OUTPUT_PAIRS = "baton_prompt_output_pairs_total"
QUEUED = "baton_router_queue_prompt_tokens"
LENGTHS = {
    "prompts": "baton_request_prompt_tokens",
    "uncached": "baton_request_uncached_prompt_tokens",
    "passed": "baton_request_passed_output_tokens",
    "outputs": "baton_request_output_tokens",
}
TIMES = {
    "ttft": "baton_time_to_first_token_seconds",
    "tpot": "baton_request_time_per_output_token_seconds",
}
_COUNTED = (
    *(ARRIVALS, ANSWERED, CACHED_PAIRS, ENDED, OUTPUT_PAIRS, QUEUED),
    "process_start_time_seconds",
    *LENGTHS.values(),
    *(f"{name}_{part}" for name in TIMES.values() for part in ("sum", "count")),
)


def keep_counted_metrics(text: str) -> str:
    """Return only the lines of a page that are counted here; the rest need not be parsed."""
    return "\n".join(line for line in text.split("\n") if line.startswith(_COUNTED))


class RouterScraper:
    """A ``TrafficSource`` that scrapes routers. ``clock``: monotonic. Raises StartupError for TLS
    files that cannot be used."""

    def __init__(
        self,
        cluster: str,
        tls: TlsFiles | None,
        *,
        interval_s: float,
        window_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stale_s = BURST_INTERVALS * interval_s
        self._cluster, self._clock = cluster, clock
        self._trust = None if tls is None else MetricsTls(tls)
        self._sliding = SlidingWindow(window_s, BURST_INTERVALS * interval_s)
        self._previous: MetricsSnapshot | None = None
        self._answered: dict[str, float] = {}  # time of the last answer, by target
        self._doubted: set[str] = set()  # routers whose figures are left out and were reported

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *gone: object) -> None:
        """Do nothing: each scrape has its own connections."""

    async def read_traffic(self, routers: Sequence[RouterRecord]) -> TrafficReading:
        """Scrape all routers. Raises Unavailable where none answers, and until the first window
        is full."""
        if not routers:
            raise Unavailable("no router is registered")
        seen = await self._scrape(routers[:MAX_ROUTERS])
        if not seen.snapshot.pages:
            raise Unavailable(
                f"no router shows its metrics: one {next(iter(seen.silent.values()))}"
            )
        now, before = seen.snapshot.at, self._previous
        self._remember(seen, now)
        if before is None:
            raise Unavailable(NOT_FULL)
        all_routers = 1.0 / (1.0 - self._share_silent(now))
        self._sliding.add(self._counted(seen, before).scaled(all_routers))
        mix = self._sliding.mix()
        if mix is None:
            raise Unavailable(NOT_FULL)
        pages = seen.snapshot.pages.values()
        queued = math.fsum(plausible_queue(sum_samples(page, QUEUED)) for page in pages)
        mix = replace(mix, backlog_tokens=all_routers * queued)
        return TrafficReading(mix, self._sliding.observed(), now)

    async def _scrape(self, routers: Sequence[RouterRecord]) -> ScrapeResult:
        listed = target_groups([], routers, self._cluster, tls=self._trust is not None)
        if self._trust is None:
            pages = MetricsScraper(LIMITS, slim=keep_counted_metrics, clock=self._clock)
        else:
            pages = MetricsScraper(
                LIMITS,
                tls=self._trust.context(),
                name=self._trust.name,
                slim=keep_counted_metrics,
                clock=self._clock,
            )
        async with pages:
            return await pages.scrape(msgspec.convert(listed, list[TargetGroup]))

    def _remember(self, seen: ScrapeResult, now: float) -> None:
        """Keep the last page of each router that is registered and was not silent for long."""
        targets, pages = {group.target for group in seen.groups}, seen.snapshot.pages
        last: Mapping[str, MetricsPage] = self._previous.pages if self._previous is not None else {}
        recent = {t for t, at in self._answered.items() if now - at <= self.stale_s}
        kept = {t: page for t, page in last.items() if t in targets & recent}
        self._previous = MetricsSnapshot(now, {**kept, **pages}, seen.snapshot.silent)
        self._answered = {t: now if t in pages else self._answered.get(t, now) for t in targets}
        self._doubted &= targets

    def _share_silent(self, now: float) -> float:
        """Return the share of routers that have not answered for long."""
        silent = [t for t, at in self._answered.items() if now - at > self.stale_s]
        return len(silent) / max(1, len(self._answered))

    def _counted(self, seen: ScrapeResult, before: MetricsSnapshot) -> TrafficCounts:
        window = RateWindow(seen.snapshot, before, time.time())
        found = [TrafficCounts(seconds=seen.snapshot.at - before.at)]
        for target in seen.snapshot.pages:
            counted = router_increase(window, target)
            if is_plausible(counted):
                found.append(counted)
            elif target not in self._doubted:
                self._doubted.add(target)
                log.warning("the metrics of router %s cannot be, and are left out", target)
        return TrafficCounts.together(found)


def router_increase(window: RateWindow, target: str) -> TrafficCounts:
    """Return what one router counted in the window, with 0 seconds, so that routers can be
    summed."""

    def lengths(name: str) -> LengthHistogram:
        total = window.count([target], f"{name}_sum")
        return LengthHistogram.cumulated(window.buckets([target], name), total)

    def mean(name: str) -> RunningMean:
        return RunningMean(*(window.count([target], f"{name}_{part}") for part in ("sum", "count")))

    return TrafficCounts(
        arrivals=window.count([target], ARRIVALS),
        answered_tokens=window.count([target], ANSWERED),
        cached_pairs=window.count([target], CACHED_PAIRS),
        prompts=lengths(LENGTHS["prompts"]),
        uncached=lengths(LENGTHS["uncached"]),
        passed=lengths(LENGTHS["passed"]),
        outputs=lengths(LENGTHS["outputs"]),
        ended_tokens=window.count([target], ENDED),
        output_pairs=window.count([target], OUTPUT_PAIRS),
        ttft=mean(TIMES["ttft"]),
        tpot=mean(TIMES["tpot"]),
    )
