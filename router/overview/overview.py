"""What `baton status` and ``/ui`` show, worked out from the pages: an Overview.

``None`` stands for what was not observed, or cannot be told from one look. Times in seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

from router.overview.metrics_pages import Seen
from router.overview.pool_view import AutoscalerView, WallView, autoscaler_view, wall_views
from router.overview.prometheus_text import Moment
from router.overview.rates import Window
from router.overview.router_view import RouterView, router_view
from router.overview.worker_view import WorkerView, worker_view

# MERGED router.overview.verdict
# Is it fine? A pure function of what was seen, with the reasons in words.
#
# down       no router reaches a decode worker that is ready: nothing can be answered
# strained   something is lost: objectives, requests, workers
# fine       neither
#
# Routers know whom they reach. What is seen of workers decides only where no router can be asked: a
# page that cannot be had is no worker that does not work.

Level: TypeAlias = Literal["fine", "strained", "down"]

IN_TIME = 0.99
"""Of the requests in the window: what should be within both objectives."""

_OBJECTIVES = {"ttft": "TTFT", "tpot": "TPOT"}


class Verdict(msgspec.Struct, frozen=True):
    """``reasons``: whole clauses, most urgent first; those of a fine cluster are empty."""

    level: Level
    reasons: list[str]


def verdict(router: RouterView, workers: list[WorkerView], window_s: float | None) -> Verdict:
    """Requests count only of a window: what went wrong at the start may be long over."""
    decode, prefill = (_reached(router, workers, role) for role in ("decode", "prefill"))
    reasons = [*_missing(decode, prefill, workers), *_absent(workers)]
    if router.silent:
        reasons.append(f"{_count(router.silent, 'router')} cannot be looked into")
    if router.cut_off:
        reasons.append(f"{_count(router.cut_off, 'router')} without a decode worker")
    if window_s is not None:
        reasons += [*_lost(router), *_late(router)]
    return Verdict("down" if not decode else "strained" if reasons else "fine", reasons)


def _reached(router: RouterView, workers: list[WorkerView], role: str) -> bool:
    """Whether a worker is ready, for all that is known."""
    if role in router.ready:
        return router.ready[role] > 0
    return any(w.role == role and w.state in ("ready", "silent") for w in workers)


def _missing(decode: bool, prefill: bool, workers: list[WorkerView]) -> Iterator[str]:
    if not decode:
        yield "no decode worker is ready, so nothing is answered"
    if not prefill and any(worker.role == "prefill" for worker in workers):
        yield "no prefill worker is ready, so decode workers compute prompts"


def _absent(workers: list[WorkerView]) -> Iterator[str]:
    for role in ("prefill", "decode"):
        states = Counter(worker.state for worker in workers if worker.role == role)
        if states["down"]:
            yield f"{_count(states['down'], f'{role} worker')} without an engine"
        if states["silent"]:
            yield f"{_count(states['silent'], f'{role} worker')} cannot be looked into"


def _lost(router: RouterView) -> Iterator[str]:
    failed = {s: n for s, n in router.requests.items() if s.startswith("5")}
    if failed:
        of = ", ".join(f"{count} with {status}" for status, count in failed.items())
        yield f"{_count(sum(failed.values()), 'request')} failed ({of})"
    if router.refusals:
        yield f"{_count(sum(router.refusals.values()), 'request')} refused for want of room"


def _late(router: RouterView) -> Iterator[str]:
    if router.slo.get("all", 1.0) >= IN_TIME:
        return
    over = {shown: 1 - router.slo.get(name, 1.0) for name, shown in _OBJECTIVES.items()}
    late = [f"{_percent(p)} over the {shown} objective" for shown, p in over.items() if p > 0]
    if late:  # else they failed, which has been said
        yield "requests: " + ", ".join(late)


def _percent(part: float) -> str:
    return f"{part:.0%}" if part >= 0.1 else f"{part:.1%}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """``window_s``: what rates, times and ratios are of; None: since each process started."""

    cluster: str
    model: str
    url: str
    window_s: float | None
    verdict: Verdict
    router: RouterView
    workers: list[WorkerView]
    walls: list[WallView] = []  # of the pools
    autoscaler: AutoscalerView | None = None  # None: there is none


def overview(url: str, seen: Seen, before: Moment | None, now_s: float) -> Overview:
    """``before``: the beginning of the window. ``now_s``: since the epoch."""
    window = Window(seen.moment, before, now_s)
    of = [group for group in seen.groups if group.about("role") == "router"]
    router = router_view([group.target for group in of], seen.moment, window, now_s)
    among = [group for group in seen.groups if group.about("role") in ("prefill", "decode")]
    workers = [worker_view(group, seen, window) for group in among]
    first = seen.groups[0] if seen.groups else None
    return Overview(
        cluster=first.about("cluster") if first else "",
        model=first.about("model") if first else "",
        url=url,
        window_s=window.seconds,
        verdict=verdict(router, workers, window.seconds),
        router=router,
        walls=wall_views([p for g in of if (p := seen.moment.pages.get(g.target))]),
        autoscaler=autoscaler_view(seen.groups, seen),
        workers=sorted(workers, key=lambda w: (w.role != "prefill", w.instance)),
    )
