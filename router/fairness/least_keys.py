"""``LeastKeys``: which of many items have the least keys now, where few keys change at a time.

    touch(name) --> changed names --next look--> heap of (key, version, name)

There may be thousands of tenants, and the queue asks for the least several times for each request.
An entry of the heap counts as long as its version is the newest of its name; others are dropped
when they come to the top. So a change costs O(log n), and a look does not go through all items.
Used by ``FairQueue``.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

_SPARE = 32  # old entries that the heap may hold beside as many as there are items

_Entry = tuple[Any, int, str]


class LeastKeys:
    """Items by name. ``key`` returns the present sort key of a name."""

    def __init__(self, key: Callable[[str], Any]) -> None:
        self._key = key
        self._versions: dict[str, int] = {}  # of the names that are items
        self._changed: dict[str, None] = {}  # a set that keeps the order
        self._heap: list[_Entry] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._versions)

    def add(self, name: str) -> None:
        """Make it an item."""
        self._versions[name] = -1
        self._changed[name] = None

    def discard(self, name: str) -> None:
        """Forget an item, if it is one."""
        self._versions.pop(name, None)
        self._changed.pop(name, None)

    def touch(self, name: str) -> None:
        """The key of an item may have changed; other names are ignored."""
        if name in self._versions:
            self._changed[name] = None

    def least(self, count: int) -> list[str]:
        """Return the names of the least items in order, at most ``count``."""
        self._refresh()
        heap, found = self._heap, list[_Entry]()
        while heap and len(found) < count:
            entry = heapq.heappop(heap)
            if self._versions.get(entry[2]) == entry[1]:
                found.append(entry)
        for entry in found:
            heapq.heappush(heap, entry)
        return [name for _, _, name in found]

    def _refresh(self) -> None:
        """Bring the entries of what has changed up to date."""
        for name in self._changed:
            number = self._versions[name] = next(self._numbers)
            heapq.heappush(self._heap, (self._key(name), number, name))
        self._changed.clear()
        if len(self._heap) > 2 * len(self._versions) + _SPARE:
            self._heap = [e for e in self._heap if self._versions.get(e[2]) == e[1]]
            heapq.heapify(self._heap)
