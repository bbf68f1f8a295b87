"""The block manager against a model that does everything the slow and obvious way."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv_cache.block_manager import BlockManager
from protocol.block_keys import KEY_BYTES

PAGES = 9
DEPTH = 6

Path = tuple[int, ...]
"""A block, named by the way to it from the root: its parent is the path without its last step."""

PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=DEPTH).map(tuple)


def key_of(path: Path) -> bytes:
    return bytes(path).ljust(KEY_BYTES, b"\xff")


def path_of(key: bytes) -> Path:
    return tuple(key.rstrip(b"\xff"))


def keys_of(path: Path) -> list[bytes]:
    return [key_of(prefix) for prefix in prefixes(path)]


def prefixes(path: Path) -> list[Path]:
    return [path[: i + 1] for i in range(len(path))]


@dataclass
class Holder:
    """A sequence: the first ``committed`` of its pages hold the blocks of ``path``."""

    path: Path
    pages: list[int]
    committed: int


@dataclass
class NaiveCache:
    """What is cached: block -> (page, when it was last used). Evicts by looking at everything."""

    blocks: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def match(self, path: Path) -> int:
        found = [prefix for prefix in prefixes(path) if prefix in self.blocks]
        assert found == prefixes(path)[: len(found)]
        return len(found)

    def victim(self, in_use: set[int]) -> int:
        """The page of the least recently used leaf that nobody uses; the leaf is forgotten."""
        parents = {path[:-1] for path in self.blocks}
        idle = {p: at for p, (page, at) in self.blocks.items() if page not in in_use}
        leaf = min((p for p in idle if p not in parents), key=lambda p: idle[p])
        return self.blocks.pop(leaf)[0]


class Pages(RuleBasedStateMachine):
    """Sequences over a binary tree of blocks come, grow, commit and go, as the scheduler's do."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(PAGES)
        self.manager.record_changes()
        self.told: set[Path] = set()
        self.cache = NaiveCache()
        self.holders: list[Holder] = []
        self.clock = 0

    def in_use(self) -> set[int]:
        return {page for h in self.holders for page in h.pages}

    def idle(self) -> int:
        return PAGES - len(self.in_use())

    def expect_taken(self, taken: list[int]) -> None:
        """``taken`` are free pages, as long as there are any, and then the right victims."""
        held, cached = self.in_use(), {page for page, _ in self.cache.blocks.values()}
        free = set(range(PAGES)) - held - cached
        assert len(set(taken)) == len(taken) and not held & set(taken)
        for page in taken:
            if free:
                free.remove(page)
            else:
                assert page == self.cache.victim(held)

    @rule(path=PATHS)
    def admit(self, path: Path) -> None:
        keys = keys_of(path)
        cached = self.manager.count_cached(keys, len(keys))
        assert cached == self.cache.match(path)
        pinned = [self.cache.blocks[p][0] for p in prefixes(path)[:cached]]
        missing = len(path) - cached
        fits = missing <= PAGES - len(self.in_use() | set(pinned))
        assert self.manager.can_extend(keys, cached, missing) == fits
        if fits:
            assert self.manager.pin(keys[:cached]) == pinned
            holder = Holder(path, list(pinned), cached)
            self.holders.append(holder)
            taken = self.manager.allocate(missing)
            self.expect_taken(taken)
            holder.pages += taken

    @precondition(lambda self: self.holders and self.idle())
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        taken = self.manager.allocate(1)
        self.expect_taken(taken)
        holder.pages += taken
        holder.path += (data.draw(st.integers(0, 1)),)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """The next blocks are computed; where somebody was quicker, the page is theirs."""
        holder = data.draw(st.sampled_from(self.holders))
        for i in range(holder.committed, data.draw(st.integers(0, len(holder.path)))):
            block = holder.path[: i + 1]
            page, _ = self.cache.blocks.setdefault(block, (holder.pages[i], self.clock))
            assert self.manager.commit(holder.pages[i], key_of(block)) == page
            holder.pages[i] = page
            holder.committed = i + 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.manager.release(holder.pages)
        self.holders.remove(holder)
        self.use(holder.path[: holder.committed])

    @rule(path=PATHS)
    def touch(self, path: Path) -> None:
        found = self.cache.match(path)
        self.manager.touch(keys_of(path)[:found])
        self.use(path[:found])

    def use(self, path: Path) -> None:
        self.clock += 1
        for block in prefixes(path):
            self.cache.blocks[block] = (self.cache.blocks[block][0], self.clock)

    @invariant()
    def counts_are_those_of_the_holders(self) -> None:
        refs = [0] * PAGES
        for holder in self.holders:
            for page in holder.pages:
                refs[page] += 1
        assert self.manager._refs == refs
        assert self.manager.available == self.idle()

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        evictable, free = list(self.manager._evictable), self.manager._free
        assert sorted([*free, *evictable, *self.in_use()]) == list(range(PAGES))

    @invariant()
    def the_cache_is_the_models_and_closed(self) -> None:
        pages = {key_of(path): page for path, (page, _) in self.cache.blocks.items()}
        assert self.manager._page == pages
        assert all(path[:-1] in self.cache.blocks for path in self.cache.blocks if len(path) > 1)

    @rule()
    def what_is_told_is_the_cache(self) -> None:
        """After any number of turns; and closed at every moment between them."""
        for stored, packed in self.manager.take_changes():
            for i in range(0, len(packed), KEY_BYTES):
                self.follow(stored, path_of(packed[i : i + KEY_BYTES]))
        assert self.told == set(self.cache.blocks)

    def follow(self, stored: bool, path: Path) -> None:
        if stored:
            assert path not in self.told and (len(path) == 1 or path[:-1] in self.told)
            self.told.add(path)
        else:
            self.told.remove(path)
            assert not {(*path, 0), (*path, 1)} & self.told

    @rule()
    def forget(self) -> None:
        held = self.in_use()
        self.manager.evict_unused()
        self.cache.blocks = {p: b for p, b in self.cache.blocks.items() if b[0] in held}


TestPages = Pages.TestCase


def test_eviction_time_does_not_grow_with_past_evictions() -> None:
    manager = BlockManager(20_000)
    pages = manager.allocate(20_000)
    for i, page in enumerate(pages):
        manager.commit(page, i.to_bytes(4, "big"))
    manager.release(pages)
    times = []
    for _ in range(4):
        began = time.thread_time()
        manager.allocate(5_000)
        times.append(time.thread_time() - began)
    assert times[3] < 5 * times[0] + 0.01
