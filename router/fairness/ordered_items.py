"""``OrderedItems``: items in the order of fixed places, of which any may be taken out.

    add --> [heap of (place, number, item)] --head, first--> the next ones
    discard --> no longer in the table; its entry of the heap is dropped at the top, or with others

A look at the next few costs O(log n) each, where a sorted list would cost O(n) for each removal.
Used by ``FairQueue``.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_SPARE = 32  # discarded entries that the heap may hold beside as many as there are items

_Entry = tuple[float, int, T]


class OrderedItems(Generic[T]):
    """Items by place, the least one first; of equal places, the one with the least number."""

    def __init__(self) -> None:
        self._entries: dict[T, _Entry[T]] = {}
        self._heap: list[_Entry[T]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, item: T, place: float, number: int) -> None:
        """Add an item; no other one may have its number."""
        entry = self._entries[item] = (place, number, item)
        heapq.heappush(self._heap, entry)

    def discard(self, item: T) -> None:
        del self._entries[item]
        if len(self._heap) > 2 * len(self._entries) + _SPARE:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def head(self) -> _Entry[T]:
        """Return the first entry; there must be one."""
        heap = self._heap
        while self._entries.get(heap[0][2]) is not heap[0]:
            heapq.heappop(heap)
        return heap[0]

    def first(self, count: int) -> list[T]:
        """Return the first items in order, at most ``count``."""
        found = list[_Entry[T]]()
        while self._heap and len(found) < count:
            entry = heapq.heappop(self._heap)
            if self._entries.get(entry[2]) is entry:
                found.append(entry)
        for entry in found:
            heapq.heappush(self._heap, entry)
        return [item for _, _, item in found]

    def all(self) -> list[T]:
        """Return all items in order."""
        return [item for _, _, item in sorted(self._entries.values())]
