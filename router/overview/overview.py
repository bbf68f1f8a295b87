"""The overview that ``baton status`` and ``/ui`` show, computed from one scrape.

``None`` stands for a value that was not observed or cannot be told from one scrape. Times are in
seconds. The health verdict is a pure function of the views:

    down       no router reaches a decode worker that is ready: no request can be answered
    strained   something is lost: objectives, requests, workers
    fine       neither

Routers report the workers that they reach. The workers' own pages count only where no router can be
asked: a worker without a page may still work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

from router.overview.pool_view import AutoscalerView, WallView, autoscaler_view, wall_views
from router.overview.prometheus_text import MetricsSnapshot
from router.overview.rates import RateWindow
from router.overview.router_view import RouterView, router_view
from router.overview.scraper import ScrapeResult
from router.overview.worker_view import WorkerView, worker_view

HealthLevel: TypeAlias = Literal["fine", "strained", "down"]

ATTAINMENT_TARGET = 0.99
"""Share of the requests in the window that should meet both objectives."""

_OBJECTIVES = {"ttft": "TTFT", "tpot": "TPOT"}


class HealthVerdict(msgspec.Struct, frozen=True):
    """The health of a cluster; ``reasons`` are clauses, most urgent first, none for a fine
    cluster."""

    level: HealthLevel
    reasons: list[str]


class ClusterOverview(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster at one moment. Rates, times and ratios are over ``window_s``; None: since the start
    of each process."""

    cluster: str
    model: str
    url: str
    window_s: float | None
    verdict: HealthVerdict
    router: RouterView
    workers: list[WorkerView]
    walls: list[WallView] = []  # of both pools
    autoscaler: AutoscalerView | None = None  # None: there is none


def cluster_overview(
    url: str, scraped: ScrapeResult, before: MetricsSnapshot | None, now_s: float
) -> ClusterOverview:
    """Compute the overview; ``before``: start of the window; ``now_s``: seconds since the epoch."""
    window = RateWindow(scraped.snapshot, before, now_s)
    routers = [g.target for g in scraped.groups if g.label("role") == "router"]
    router = router_view(routers, scraped.snapshot, window, now_s)
    workers = [
        worker_view(g, scraped, window)
        for g in scraped.groups
        if g.label("role") in ("prefill", "decode")
    ]
    first = scraped.groups[0] if scraped.groups else None
    return ClusterOverview(
        cluster=first.label("cluster") if first else "",
        model=first.label("model") if first else "",
        url=url,
        window_s=window.seconds,
        verdict=health_verdict(router, workers, window.seconds),
        router=router,
        walls=wall_views([p for r in routers if (p := scraped.snapshot.pages.get(r))]),
        autoscaler=autoscaler_view(scraped),
        workers=sorted(workers, key=lambda w: (w.role != "prefill", w.instance)),
    )


def health_verdict(
    router: RouterView, workers: list[WorkerView], window_s: float | None
) -> HealthVerdict:
    """Judge the cluster. Without a window requests do not count: a failure may be long ago."""
    decode, prefill = (_reached(router, workers, role) for role in ("decode", "prefill"))
    reasons = [*_missing(decode, prefill, workers), *_absent(workers)]
    if router.silent:
        reasons.append(f"{_count(router.silent, 'router')} cannot be reached for metrics")
    if router.cut_off:
        reasons.append(f"{_count(router.cut_off, 'router')} without a decode worker")
    if window_s is not None:
        reasons += [*_lost(router), *_late(router)]
    return HealthVerdict("down" if not decode else "strained" if reasons else "fine", reasons)


def _reached(router: RouterView, workers: list[WorkerView], role: str) -> bool:
    """Return whether a worker of this role is ready, as far as is known."""
    if role in router.ready:
        return router.ready[role] > 0
    return any(w.role == role and w.state in ("ready", "silent") for w in workers)


def _missing(decode: bool, prefill: bool, workers: list[WorkerView]) -> Iterator[str]:
    if not decode:
        yield "no decode worker is ready, so no request can be answered"
    if not prefill and any(worker.role == "prefill" for worker in workers):
        yield "no prefill worker is ready, so decode workers compute prompts"


def _absent(workers: list[WorkerView]) -> Iterator[str]:
    for role in ("prefill", "decode"):
        states = Counter(worker.state for worker in workers if worker.role == role)
        if states["down"]:
            yield f"{_count(states['down'], f'{role} worker')} without an engine"
        if states["silent"]:
            yield f"{_count(states['silent'], f'{role} worker')} cannot be reached for metrics"


def _lost(router: RouterView) -> Iterator[str]:
    failed = {s: n for s, n in router.requests.items() if s.startswith("5")}
    if failed:
        of = ", ".join(f"{count} with {status}" for status, count in failed.items())
        yield f"{_count(sum(failed.values()), 'request')} failed ({of})"
    if router.refusals:
        yield f"{_count(sum(router.refusals.values()), 'request')} refused because of overload"


def _late(router: RouterView) -> Iterator[str]:
    if router.slo.get("all", 1.0) >= ATTAINMENT_TARGET:
        return
    over = {shown: 1 - router.slo.get(name, 1.0) for name, shown in _OBJECTIVES.items()}
    late = [f"{_percent(p)} over the {shown} objective" for shown, p in over.items() if p > 0]
    if late:  # otherwise they failed, which is another reason
        yield "requests: " + ", ".join(late)


def _percent(part: float) -> str:
    return f"{part:.0%}" if part >= 0.1 else f"{part:.1%}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"
