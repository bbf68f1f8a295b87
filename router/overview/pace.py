"""How often is looked: a look costs CPU time of the loop that streams run on, the more the more
processes there are.

begin(at, cpu) -> end(at, cpu) -> due(at)?

``at``: seconds, monotonic; ``cpu``: CPU seconds of the thread, which serves others, too: what these
used between looks, they are taken to use during them.
"""

from __future__ import annotations

SHARE = 0.1
"""Of a core, for looks."""
ENOUGH_S = 0.1
"""Between looks, to say what others use."""


class Pace:
    """``at``, ``cpu``: when there was no look yet. ``least_s``: between the begins of two."""

    def __init__(self, at: float, cpu: float, least_s: float) -> None:
        self._least_s = least_s
        self._began = self._ended = (at, cpu)
        self._others = 0.0  # of a core
        self._next = at

    def begin(self, at: float, cpu: float) -> None:
        """Of a look."""
        since, used = at - self._ended[0], cpu - self._ended[1]
        if since >= ENOUGH_S:
            self._others = min(used / since, 1.0)
        self._began = (at, cpu)

    def end(self, at: float, cpu: float) -> None:
        began, cpu_then = self._began
        cost = cpu - cpu_then - self._others * (at - began)
        self._next = began + max(cost / SHARE, self._least_s)
        self._ended = (at, cpu)

    def due(self, at: float) -> bool:
        """Whether the next look may begin."""
        return at >= self._next
