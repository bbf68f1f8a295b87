"""What happened between two moments of all processes, or since the start of each. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from router.overview.prometheus_text import Buckets, Moment, Page, gauge, matching


class Window:
    """What happened between two moments; ``before`` None: since each process started.

    A counter that is lower than before belongs to a process that started anew: all of it counts, as
    of a process that is younger than the window. Of any other that ``before`` has no page of it is
    not known what came in the window: it has no figures, and is in no sum.

    ``now_s``: since the epoch, as processes say when they started.
    """

    def __init__(self, now: Moment, before: Moment | None, now_s: float = math.inf) -> None:
        self._now = now
        self._before = before
        self._now_s = now_s

    @property
    def seconds(self) -> float | None:
        """None: since the start."""
        return None if self._before is None else self._now.at - self._before.at

    def count(self, targets: Iterable[str], name: str, **labels: str) -> float:
        """The increase of a counter, over all its series at these targets."""
        found = self._increases(targets, name, labels)
        return math.fsum(increase for _, increase in found)

    def rate(self, targets: Iterable[str], name: str, **labels: str) -> float | None:
        """Per second, of those that have figures; None where nobody has, and since the start, which
        is not the same for all."""
        spans = {target: s for target in targets if (s := self._span(target))}
        rates = [self.count([target], name, **labels) / s for target, s in spans.items()]
        return math.fsum(rates) if rates else None

    def by(self, targets: Iterable[str], name: str, label: str) -> dict[str, float]:
        """The increase of a counter by one of its labels."""
        found: dict[str, float] = {}
        for labels, increase in self._increases(targets, name, {}):
            value = labels.get(label, "")
            found[value] = found.get(value, 0.0) + increase
        return found

    def ratio(self, targets: list[str], part: str, whole: str) -> float | None:
        """Of two counters; None where nothing was counted."""
        of = self.count(targets, whole)
        return self.count(targets, part) / of if of else None

    def mean(self, targets: list[str], name: str, **labels: str) -> float | None:
        """Of a histogram's observations."""
        count = self.count(targets, f"{name}_count", **labels)
        return self.count(targets, f"{name}_sum", **labels) / count if count else None

    def buckets(self, targets: Iterable[str], name: str, **labels: str) -> Buckets:
        found: dict[float, float] = {}
        for of, increase in self._increases(targets, f"{name}_bucket", labels):
            edge = float(of["le"])
            found[edge] = found.get(edge, 0.0) + increase
        return sorted(found.items())

    def _increases(
        self, targets: Iterable[str], name: str, labels: Mapping[str, str]
    ) -> Iterator[tuple[Mapping[str, str], float]]:
        for target in targets:
            old = self._begin(target)
            if old is None:
                continue
            known = {tuple(sorted(s.labels.items())): s.value for s in matching(old, name, labels)}
            for sample in matching(self._now.pages.get(target, {}), name, labels):
                last = known.get(tuple(sorted(sample.labels.items())), 0.0)
                restarted = sample.value < last
                yield sample.labels, sample.value - (0.0 if restarted else last)

    def _begin(self, target: str) -> Page | None:
        """What its counters began with; None: nobody knows."""
        if self._before is None or self._is_young(target):
            return {}
        return self._before.pages.get(target)

    def _span(self, target: str) -> float | None:
        """Seconds in which its counters grew."""
        if self._before is None or target not in self._now.pages or self._begin(target) is None:
            return None
        if self._is_young(target):
            return self.seconds
        return self._now.at - self._before.later.get(target, self._before.at)

    def _is_young(self, target: str) -> bool:
        """Whether it started in the window, and was not there before."""
        before = self._before
        assert before is not None
        late = target not in before.pages or target in before.later
        if not late or target in before.silent:
            return False
        start = gauge(self._now.pages.get(target, {}), "process_start_time_seconds")
        return start > 0 and self._now_s - start < self._now.at - before.at


# MERGED router.overview.past
# The looks of the last half minute: what a window of rates begins with.

WINDOW_S = 30.0
APART_S = 2.0
"""Looks that are closer than this are not all kept: pages are large."""


class Past:
    def __init__(self) -> None:
        self._looks: deque[Moment] = deque()

    def take(self, moment: Moment) -> Moment | None:
        """The beginning of the window that ends with this look; None where it is the first.

        Where looks are further apart than WINDOW_S, it is the one before.
        """
        while len(self._looks) > 1 and moment.at - self._looks[0].at > WINDOW_S:
            self._looks.popleft()
        before = beginning(self._looks)
        if before is None or moment.at - self._looks[-1].at >= APART_S:
            self._looks.append(moment)
        return before

    @property
    def kept(self) -> int:
        """Looks that are held."""
        return len(self._looks)

    def clear(self) -> None:
        self._looks.clear()


def beginning(looks: Iterable[Moment]) -> Moment | None:
    """The oldest of these, with the oldest page of each process that it has none of."""
    first: Moment | None = None
    pages: dict[str, Page] = {}
    silent: set[str] = set()
    later: dict[str, float] = {}
    for look in looks:
        first = first or look
        for target in look.pages.keys() - pages.keys():
            pages[target] = look.pages[target]
            if look is not first:
                later[target] = look.at
        silent |= look.silent - pages.keys()
    return None if first is None else Moment(first.at, pages, frozenset(silent), later)
