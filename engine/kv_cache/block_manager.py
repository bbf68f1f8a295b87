"""The block manager: reference counts of pages, and the prefix cache over them.

    free --allocate--> in use --release--> free            (page without a key)
                         |  ^
                  commit |  | pin
                         v  |
                      cached, in use --release--> cached, evictable --allocate--> in use

A page with a key (``commit``) is in the prefix cache: the next request with the same prefix finds
it. When no sequence uses it, it stays in ``_evictable``, least recently used first, until its page
is needed. A page without a key is free as soon as its last reference is released.

Pages are allocated by the scheduler (admission, one more page for a decoding sequence, imports) and
by ``draft_pages`` (for one step). ``Sequence.release`` frees those of a sequence when it finishes
or is preempted; ``trim_draft_pages`` frees those of rejected drafts after their step.

A sequence that holds a block also holds the block's parents, and releases its last page first. So
along a chain of blocks, from parent to child, reference counts never increase, and a child is
evicted before its parent. A cached prefix is therefore never evicted before its extensions, and
``bisect`` finds the end of a cached chain.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Sequence


class BlockManager:
    """Owns every page of one pool; the engine creates one. Each page returned by ``allocate`` or
    ``pin`` is one reference, which the caller must ``release`` once. Arguments ``keys`` are always
    the keys of a chain of blocks from its first block on."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))  # a stack: the page freed last is warm
        self._refs = [0] * pages
        self._key: list[bytes | None] = [None] * pages
        self._page: dict[bytes, int] = {}
        # Oldest first. A plain dict would scan all deleted entries to find its first one.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._changes: list[tuple[bool, list[bytes]]] | None = None

    # ---- changes of the cache -----------------------------------------------------------------

    def record_changes(self) -> None:
        """Record the changes that ``take_changes`` returns, from now on."""
        self._changes = []

    def take_changes(self) -> list[tuple[bool, bytes]]:
        """Return what was stored (True) and evicted (False) since the last call, in order, as runs
        of packed keys. A block is stored after its parent and evicted before it."""
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

    def evict_unused(self) -> None:
        """Evict every cached block that no sequence uses."""
        self._free += [self._evict() for _ in range(len(self._evictable))]

    # ---- pages --------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Number of pages that ``allocate`` could return now."""
        return len(self._free) + len(self._evictable)

    def count_cached(self, keys: Sequence[bytes], limit: int) -> int:
        """Return how many leading blocks, at most ``limit``, are cached, in O(log limit)."""
        return bisect_left(range(limit), True, key=lambda i: keys[i] not in self._page)

    def can_extend(self, keys: Sequence[bytes], cached: int, count: int) -> bool:
        """Return whether ``count`` pages are available after ``cached`` blocks are pinned."""
        used = bisect_left(range(cached), True, key=lambda i: not self._refs[self._page[keys[i]]])
        return count <= self.available - (cached - used)

    def count_freed_by(self, holders: Sequence[Sequence[int]], keep: Sequence[bytes]) -> int:
        """Return how many pages would have no user left if ``holders`` released theirs, without
        counting the pages of the blocks ``keep``."""
        held = Counter(page for pages in holders for page in pages)
        for key in keep:
            held.pop(self._page[key], None)
        return sum(self._refs[page] == count for page, count in held.items())

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make cached blocks the last to be evicted, and the first of them the very last."""
        for key in reversed(keys):
            page = self._page[key]
            if self._refs[page] == 0:
                self._evictable.move_to_end(page)

    def pin(self, keys: Sequence[bytes]) -> list[int]:
        """Take a reference on each of these cached blocks and return their pages. The caller frees
        them with ``release``."""
        pages = [self._page[key] for key in keys]
        for page in pages:
            if self._refs[page] == 0:
                del self._evictable[page]
            self._refs[page] += 1
        return pages

    def allocate(self, count: int) -> list[int]:
        """Return ``count`` pages with undefined content and one reference each, which the caller
        frees with ``release``. The oldest cached blocks are evicted when no page is free. The
        caller has checked that ``count`` pages are ``available``."""
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
        """Declare that a page in use holds the full, computed block ``key``. The caller has
        committed the parents of the block before, so a cached block's parents are always cached.

        Return the page to use for the block from now on: ``page``, or the page that already holds
        the block; then ``page`` is released and the other one pinned."""
        assert self._refs[page] > 0 and self._key[page] is None
        if key not in self._page:
            self._page[key] = page
            self._key[page] = key
            self._note(True, key)
            return page
        self.release([page])
        return self.pin([key])[0]

    def release(self, pages: Sequence[int]) -> None:
        """Give back one reference on each page, listed in the order of the sequence. Pages without
        users become free, or evictable if they hold a cached block."""
        for page in reversed(pages):
            self._refs[page] -= 1
            assert self._refs[page] >= 0
            if self._refs[page] == 0:
                if self._key[page] is None:
                    self._free.append(page)
                else:
                    self._evictable[page] = None
