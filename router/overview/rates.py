"""What happened between two scrapes of all processes, or since the start of each process."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from router.overview.prometheus_text import (
    Buckets,
    MetricsPage,
    MetricsSnapshot,
    matching_samples,
    sum_samples,
)

WINDOW_S = 30.0
MIN_SPACING_S = 2.0
"""Of scrapes closer than this not all are kept: pages are large."""


class RateWindow:
    """Increases, rates and means between two snapshots; ``before`` None: since each process
    started.

    A counter that is lower than before belongs to a restarted process: all of it counts, as for a
    process that is younger than the window. For any other process without a page in ``before`` the
    increase is unknown: it has no figures and is in no sum.

    ``now_s``: seconds since the epoch, as in the start times of processes.
    """

    def __init__(
        self, now: MetricsSnapshot, before: MetricsSnapshot | None, now_s: float = math.inf
    ) -> None:
        self._now = now
        self._before = before
        self._now_s = now_s

    @property
    def seconds(self) -> float | None:
        """Return the window's length; None: since the start of each process."""
        return None if self._before is None else self._now.at - self._before.at

    def count(self, targets: Iterable[str], name: str, **labels: str) -> float:
        """Return the increase of a counter, over all its series at these targets."""
        found = self._increases(targets, name, labels)
        return math.fsum(increase for _, increase in found)

    def rate(self, targets: Iterable[str], name: str, **labels: str) -> float | None:
        """Return the increase per second over the targets with figures; None where there is none,
        and since the start, as processes start at different times."""
        spans = {target: s for target in targets if (s := self._span(target))}
        rates = [self.count([target], name, **labels) / s for target, s in spans.items()]
        return math.fsum(rates) if rates else None

    def by(self, targets: Iterable[str], name: str, label: str) -> dict[str, float]:
        """Return the increase of a counter by the values of one label."""
        found: dict[str, float] = {}
        for labels, increase in self._increases(targets, name, {}):
            value = labels.get(label, "")
            found[value] = found.get(value, 0.0) + increase
        return found

    def ratio(self, targets: list[str], part: str, whole: str) -> float | None:
        """Return the ratio of two counters' increases; None where nothing was counted."""
        total = self.count(targets, whole)
        return self.count(targets, part) / total if total else None

    def mean(self, targets: list[str], name: str, **labels: str) -> float | None:
        """Return the mean of a histogram's observations."""
        count = self.count(targets, f"{name}_count", **labels)
        return self.count(targets, f"{name}_sum", **labels) / count if count else None

    def buckets(self, targets: Iterable[str], name: str, **labels: str) -> Buckets:
        found: dict[float, float] = {}
        for sample_labels, increase in self._increases(targets, f"{name}_bucket", labels):
            edge = float(sample_labels["le"])
            found[edge] = found.get(edge, 0.0) + increase
        return sorted(found.items())

    def _increases(
        self, targets: Iterable[str], name: str, labels: Mapping[str, str]
    ) -> Iterator[tuple[Mapping[str, str], float]]:
        for target in targets:
            old = self._page_before(target)
            if old is None:
                continue
            known = {
                tuple(sorted(s.labels.items())): s.value
                for s in matching_samples(old, name, labels)
            }
            for sample in matching_samples(self._now.pages.get(target, {}), name, labels):
                last = known.get(tuple(sorted(sample.labels.items())), 0.0)
                restarted = sample.value < last
                yield sample.labels, sample.value - (0.0 if restarted else last)

    def _page_before(self, target: str) -> MetricsPage | None:
        """Return the page at the window's start; None where it is unknown."""
        if self._before is None or self._is_young(target):
            return {}
        return self._before.pages.get(target)

    def _span(self, target: str) -> float | None:
        """Return the seconds over which the target's counters grew."""
        if (
            self._before is None
            or target not in self._now.pages
            or self._page_before(target) is None
        ):
            return None
        if self._is_young(target):
            return self.seconds
        return self._now.at - self._before.later.get(target, self._before.at)

    def _is_young(self, target: str) -> bool:
        """Return whether the process started in the window, and was not there before."""
        before = self._before
        assert before is not None
        late = target not in before.pages or target in before.later
        if not late or target in before.silent:
            return False
        start = sum_samples(self._now.pages.get(target, {}), "process_start_time_seconds")
        return start > 0 and self._now_s - start < self._now.at - before.at


class ScrapeHistory:
    """The scrapes of the last WINDOW_S, one of which starts the window that rates are computed
    over."""

    def __init__(self) -> None:
        self._snapshots: deque[MetricsSnapshot] = deque()

    def add(self, snapshot: MetricsSnapshot) -> MetricsSnapshot | None:
        """Return the start of the window that ends with this scrape; None for the first scrape.

        Where scrapes are further apart than WINDOW_S, the window starts at the previous one.
        """
        kept = self._snapshots
        while len(kept) > 1 and snapshot.at - kept[0].at > WINDOW_S:
            kept.popleft()
        before = window_start(kept)
        if before is None or snapshot.at - kept[-1].at >= MIN_SPACING_S:
            kept.append(snapshot)
        return before

    def __len__(self) -> int:
        return len(self._snapshots)

    def clear(self) -> None:
        self._snapshots.clear()


def window_start(snapshots: Iterable[MetricsSnapshot]) -> MetricsSnapshot | None:
    """Return the oldest snapshot, completed by the oldest page of each process that it lacks."""
    first: MetricsSnapshot | None = None
    pages: dict[str, MetricsPage] = {}
    silent: set[str] = set()
    later: dict[str, float] = {}
    for snapshot in snapshots:
        first = first or snapshot
        for target in snapshot.pages.keys() - pages.keys():
            pages[target] = snapshot.pages[target]
            if snapshot is not first:
                later[target] = snapshot.at
        silent |= snapshot.silent - pages.keys()
    return None if first is None else MetricsSnapshot(first.at, pages, frozenset(silent), later)
