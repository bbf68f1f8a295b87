"""The looks of the last half minute: what a window of rates begins with."""

from __future__ import annotations

from collections import deque

from router.overview.figures import Moment

WINDOW_S = 30.0
APART_S = 2.0
"""Looks that are closer than this are not all kept: pages are large."""


class Past:
    def __init__(self) -> None:
        self._looks: deque[Moment] = deque()

    def take(self, moment: Moment) -> Moment | None:
        """The beginning of the window that ends with this look; None where it is the first."""
        while self._looks and moment.at - self._looks[0].at > WINDOW_S:
            self._looks.popleft()
        before = self._looks[0] if self._looks else None
        if before is None or moment.at - self._looks[-1].at >= APART_S:
            self._looks.append(moment)
        return before

    @property
    def kept(self) -> int:
        """Looks that are held."""
        return len(self._looks)

    def clear(self) -> None:
        self._looks.clear()
