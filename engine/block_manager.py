"""Which page holds what, and who uses it: reference counts and the prefix cache.

    free --allocate--> in use --release--> free            (page without a key)
                         |  ^
                  commit |  | pin
                         v  |
                      cached, in use --release--> cached, evictable --allocate--> in use

A page with a key (``commit``) can be found by the next request with the same prefix. When nobody
uses it, it waits in ``_evictable``, oldest first, until its page is needed. A sequence releases its
last page first, so that a prefix never leaves before what extends it.
"""

from __future__ import annotations

from collections.abc import Sequence


class BlockManager:
    """Owns every page of one pool. Pages come from ``allocate`` or ``pin`` and must be released
    once for each."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))  # the last one freed goes first: it is warm
        self._refs = [0] * pages
        self._key: list[bytes | None] = [None] * pages
        self._page: dict[bytes, int] = {}
        self._evictable: dict[int, None] = {}  # insertion order: oldest first

    @property
    def available(self) -> int:
        """Pages that ``allocate`` could give now."""
        return len(self._free) + len(self._evictable)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the longest cached prefix of ``keys``; pinned by nobody yet."""
        pages = []
        for key in keys:
            page = self._page.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def can_allocate(self, count: int, pinning: Sequence[int] = ()) -> bool:
        """Whether ``count`` pages can be had after ``pinning`` (matched pages) is pinned."""
        idle = sum(1 for page in pinning if self._refs[page] == 0)
        return count <= self.available - idle

    def touch(self, pages: Sequence[int]) -> None:
        """Make cached pages the last to be evicted, their first one last of all."""
        for page in reversed(pages):
            if self._refs[page] == 0:
                del self._evictable[page]
                self._evictable[page] = None

    def pin(self, pages: Sequence[int]) -> None:
        """Take a reference on cached pages."""
        for page in pages:
            if self._refs[page] == 0:
                del self._evictable[page]
            self._refs[page] += 1

    def allocate(self, count: int) -> list[int]:
        """``count`` pages with undefined content; the oldest cached ones are evicted when no page
        is free. The caller has asked ``can_allocate``."""
        assert count <= self.available
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page = next(iter(self._evictable))
            del self._evictable[page]
            key = self._key[page]
            assert key is not None
            del self._page[key]
            self._key[page] = None
        self._refs[page] = 1
        return page

    def commit(self, page: int, key: bytes) -> int:
        """Declare a page in use to hold the block ``key``, full and computed.

        Returns the page to use for the block from now on: ``page``, or the one that already holds
        it, the reference having moved there. So a cached block's parents are always cached."""
        assert self._refs[page] > 0 and self._key[page] is None
        holder = self._page.get(key)
        if holder is None:
            self._page[key] = page
            self._key[page] = key
            return page
        self.pin([holder])
        self.release([page])
        return holder

    def release(self, pages: Sequence[int]) -> None:
        """Give back one reference on each page of a sequence, given in the sequence's order."""
        for page in reversed(pages):
            self._refs[page] -= 1
            assert self._refs[page] >= 0
            if self._refs[page] == 0:
                if self._key[page] is None:
                    self._free.append(page)
                else:
                    self._evictable[page] = None
