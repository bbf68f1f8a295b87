"""Is it fine? A pure function of what was seen, with the reasons in words.

down       no decode worker is ready: nothing can be answered
strained   something is lost: objectives, requests, workers
fine       neither
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

from router.overview.router_view import RouterView
from router.overview.worker_view import WorkerView

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
    ready = Counter(worker.role for worker in workers if worker.state == "ready")
    reasons = [*_missing(ready, workers), *_absent(workers)]
    if router.silent:
        reasons.append(f"{_count(router.silent, 'router')} cannot be looked into")
    if window_s is not None:
        reasons += [*_lost(router), *_late(router)]
    down = not ready["decode"]
    return Verdict("down" if down else "strained" if reasons else "fine", reasons)


def _missing(ready: Counter[str], workers: list[WorkerView]) -> Iterator[str]:
    if not ready["decode"]:
        yield "no decode worker is ready, so nothing is answered"
    if not ready["prefill"] and any(worker.role == "prefill" for worker in workers):
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
