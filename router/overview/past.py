"""The looks of the last half minute: what a window of rates begins with."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from router.overview.figures import Moment, Page

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
