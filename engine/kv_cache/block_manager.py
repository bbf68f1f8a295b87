"""Which page holds what, and who uses it: reference counts and the prefix cache.

    free --allocate--> in use --release--> free            (page without a key)
                         |  ^
                  commit |  | pin
                         v  |
                      cached, in use --release--> cached, evictable --allocate--> in use

A page with a key (``commit``) can be found by the next request with the same prefix. When nobody
uses it, it waits in ``_evictable``, least recently used first, until its page is needed.

Who holds a block holds its parents, and releases its last page first. So along a chain of blocks
neither reference counts nor places in ``_evictable`` ever go back from child to parent: a prefix
never leaves before what extends it, and a chain can be bisected.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Sequence


class BlockManager:
    """Owns every page of one pool. Pages come from ``allocate`` or ``pin`` and must be released
    once for each. ``keys`` are always those of a chain of blocks, from its first one on."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))  # the last one freed goes first: it is warm
        self._refs = [0] * pages
        self._key: list[bytes | None] = [None] * pages
        self._page: dict[bytes, int] = {}
        # Oldest first. Not a dict: its first entry is found past all those deleted before it.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._changes: list[tuple[bool, list[bytes]]] | None = None

    # ---- what is cached, told -----------------------------------------------------------------

    def report(self) -> None:
        """Note from now on what ``take_changes`` gives; before, nothing is noted."""
        self._changes = []

    def take_changes(self) -> list[tuple[bool, bytes]]:
        """What came into the cache (True) and went (False) since the last call, in order: runs of
        packed keys. A block comes after its parent, and goes before it."""
        if not self._changes:
            return []
        taken, self._changes = self._changes, []
        return [(stored, b"".join(keys)) for stored, keys in taken]

    def _note(self, stored: bool, key: bytes) -> None:
        if self._changes is None:
            return
        if not self._changes or self._changes[-1][0] is not stored:
            self._changes.append((stored, []))
        self._changes[-1][1].append(key)

    def forget(self) -> None:
        """Free every page that nobody uses; what was cached in them is gone."""
        self._free += [self._evict() for _ in range(len(self._evictable))]

    # ---- pages --------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Pages that ``allocate`` could give now."""
        return len(self._free) + len(self._evictable)

    def cached(self, keys: Sequence[bytes], limit: int) -> int:
        """How many of the first ``limit`` blocks are cached from the first one on. Looks at
        O(log limit) of them."""
        return bisect_left(range(limit), True, key=lambda i: keys[i] not in self._page)

    def can_extend(self, keys: Sequence[bytes], cached: int, count: int) -> bool:
        """Whether ``count`` pages can be had once the first ``cached`` blocks are pinned."""
        used = bisect_left(range(cached), True, key=lambda i: not self._refs[self._page[keys[i]]])
        return count <= self.available - (cached - used)

    def freed_by(self, holders: Sequence[Sequence[int]], keep: Sequence[bytes]) -> int:
        """Pages that nobody would use any more if ``holders`` released theirs; those of the blocks
        ``keep`` do not count."""
        held = Counter(page for pages in holders for page in pages)
        for key in keep:
            held.pop(self._page[key], None)
        return sum(self._refs[page] == count for page, count in held.items())

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make cached blocks the last to be evicted, their first one last of all."""
        for key in reversed(keys):
            page = self._page[key]
            if self._refs[page] == 0:
                self._evictable.move_to_end(page)

    def pin(self, keys: Sequence[bytes]) -> list[int]:
        """Take a reference on cached blocks; returns their pages."""
        pages = [self._page[key] for key in keys]
        for page in pages:
            if self._refs[page] == 0:
                del self._evictable[page]
            self._refs[page] += 1
        return pages

    def allocate(self, count: int) -> list[int]:
        """``count`` pages with undefined content; the oldest cached ones are evicted when no page
        is free. The caller has made sure that they are ``available``."""
        assert count <= self.available
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        page = self._free.pop() if self._free else self._evict()
        self._refs[page] = 1
        return page

    def _evict(self) -> int:
        page, _ = self._evictable.popitem(last=False)
        key = self._key[page]
        assert key is not None
        del self._page[key]
        self._key[page] = None
        self._note(False, key)
        return page

    def commit(self, page: int, key: bytes) -> int:
        """Declare a page in use to hold the block ``key``, full and computed. The holder's pages of
        the block's parents are committed.

        Returns the page to use for the block from now on: ``page``, or the one that already holds
        it, the reference having moved there. So a cached block's parents are always cached."""
        assert self._refs[page] > 0 and self._key[page] is None
        if key not in self._page:
            self._page[key] = page
            self._key[page] = key
            self._note(True, key)
            return page
        self.release([page])
        return self.pin([key])[0]

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
