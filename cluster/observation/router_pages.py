"""Requests counted on the routers' own pages: what each has counted since the look before.

routers (directory) --/metrics, all at once--> increases of each --sum--> Sliding --> Look

A router that does not answer is not missed for a while: its next page tells what came meanwhile.
After ``stale_s`` those that answer are taken to be like it. What a router had counted when it was
first seen, or after the last look at one that is gone, is not known.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Self

import msgspec
from msgspec.structs import replace

from cluster.observation.reading import Look, sane
from cluster.observation.request_lengths import Histogram
from cluster.observation.request_mix import Counted, Mean
from cluster.observation.sliding_window import BURST_LOOKS, Sliding
from protocol.errors import Unavailable
from protocol.registry.directory import RouterRecord
from protocol.security.tls import TlsFiles
from router.http.service_discovery import groups
from router.overview.metrics_pages import Group, Limits, Pages, Seen
from router.overview.prometheus_text import Moment, Page
from router.overview.rates import Window
from router.overview.watcher import Trust

log = logging.getLogger("baton.autoscaler")

LIMITS = Limits(deadline_s=2.0, size=1 << 20)
MOST_ROUTERS = 1024
ARRIVALS = "baton_requests_received_total"
ANSWERED = "baton_prompt_tokens_total"
LENGTHS = {
    "prompts": "baton_request_prompt_tokens",
    "uncached": "baton_request_uncached_prompt_tokens",
    "outputs": "baton_request_output_tokens",
}
TIMES = {
    "ttft": "baton_time_to_first_token_seconds",
    "tpot": "baton_request_time_per_output_token_seconds",
}
_WANTED = (
    *(ARRIVALS, ANSWERED, "process_start_time_seconds"),
    *LENGTHS.values(),
    *(f"{name}_{part}" for name in TIMES.values() for part in ("sum", "count")),
)


def slim(text: str) -> str:
    """Only what is counted here: the rest of a page need not be parsed."""
    return "\n".join(line for line in text.split("\n") if line.startswith(_WANTED))


class Scraper:
    """Raises StartupError for TLS files that cannot be used."""

    def __init__(
        self,
        cluster: str,
        tls: TlsFiles | None,
        *,
        interval_s: float,
        window_s: float,
    ) -> None:
        self.stale_s = BURST_LOOKS * interval_s
        self._cluster = cluster
        self._trust = None if tls is None else Trust(tls)
        self._sliding = Sliding(window_s, BURST_LOOKS * interval_s)
        self._before: Moment | None = None
        self._answered: dict[str, float] = {}  # when a router last did, by target
        self._doubted: set[str] = set()  # whose figures were left out, and that was said

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *gone: object) -> None:
        """Connections are of one look each."""

    async def look(self, routers: Sequence[RouterRecord]) -> Look:
        """Raises Unavailable where no router answers, and the first time: nothing has been counted
        between two looks then."""
        if not routers:
            raise Unavailable("no router is registered")
        seen = await self._ask(routers[:MOST_ROUTERS])
        if not seen.moment.pages:
            raise Unavailable(
                f"no router shows its metrics: one {next(iter(seen.silent.values()))}"
            )
        now, before = seen.moment.at, self._before
        self._remember(seen, now)
        if before is None:
            raise Unavailable("requests are counted from now on")
        self._sliding.add(self._counted(seen, before))
        mix = self._sliding.mix()
        assert mix is not None
        silent = self._share_silent(seen, now)
        if silent:
            more = 1.0 / (1.0 - silent)
            mix = replace(mix, rate=mix.rate * more, burst_rate=mix.burst_rate * more)
        return Look(mix, self._sliding.observed(), now)

    async def _ask(self, routers: Sequence[RouterRecord]) -> Seen:
        listed = groups([], routers, self._cluster, tls=self._trust is not None)
        if self._trust is None:
            pages = Pages(LIMITS, slim=slim)
        else:
            pages = Pages(LIMITS, tls=self._trust.context(), name=self._trust.name, slim=slim)
        async with pages:
            return await pages.look(msgspec.convert(listed, list[Group]))

    def _remember(self, seen: Seen, now: float) -> None:
        """The last page of each router that is there."""
        there = {group.target for group in seen.groups}
        last: Mapping[str, Page] = self._before.pages if self._before is not None else {}
        kept = {target: page for target, page in last.items() if target in there}
        pages = seen.moment.pages
        self._before = Moment(now, {**kept, **pages}, seen.moment.silent)
        self._answered = {t: now if t in pages else self._answered.get(t, now) for t in there}
        self._doubted &= there

    def _share_silent(self, seen: Seen, now: float) -> float:
        """Routers that have not answered for long, of all of them."""
        silent = [t for t, at in self._answered.items() if now - at > self.stale_s]
        return len(silent) / max(1, len(self._answered))

    def _counted(self, seen: Seen, before: Moment) -> Counted:
        window = Window(seen.moment, before, time.time())
        found = [Counted(seconds=seen.moment.at - before.at)]
        for target in seen.moment.pages:
            counted = increase(window, target)
            if sane(counted):
                found.append(counted)
            elif target not in self._doubted:
                self._doubted.add(target)
                log.warning("the metrics of router %s cannot be, and are left out", target)
        return Counted.together(found)


def increase(window: Window, target: str) -> Counted:
    """What a router counted in the window, which is counted in no seconds."""

    def lengths(name: str) -> Histogram:
        total = window.count([target], f"{name}_sum")
        return Histogram.cumulated(window.buckets([target], name), total)

    def mean(name: str) -> Mean:
        return Mean(*(window.count([target], f"{name}_{part}") for part in ("sum", "count")))

    return Counted(
        arrivals=window.count([target], ARRIVALS),
        answered_tokens=window.count([target], ANSWERED),
        prompts=lengths(LENGTHS["prompts"]),
        uncached=lengths(LENGTHS["uncached"]),
        outputs=lengths(LENGTHS["outputs"]),
        ttft=mean(TIMES["ttft"]),
        tpot=mean(TIMES["tpot"]),
    )
