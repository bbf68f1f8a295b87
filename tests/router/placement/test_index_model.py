"""Index and cursor against a naive model, under any interleaving of what can happen.

A writer changes its cache, tells it, loses numbers, starts anew as another instance. What it told
lies in a stream and a snapshot, which are trimmed, flushed, overwritten. Two routers read it when
they like, from where they like. At any time a router's index must hold what the writer had cached
at the number that the router has read up to: exactly, or nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.worker.event_log import CacheChanges
from protocol.errors import MalformedEvents
from protocol.kv_events import FIELD, MARK, encode_entries, encode_snapshot
from router.placement.event_cursor import EventCursor
from router.placement.prefix_index import PrefixIndex

DEPTH = 5
WORKERS = 2


def key(path: str) -> bytes:
    return hashlib.blake2b(path.encode(), digest_size=16).digest()


PROMPTS = [f"{i:0{DEPTH}b}" for i in range(2**DEPTH)]
CHAINS = [[key(p[: i + 1]) for i in range(DEPTH)] for p in PROMPTS]
CHILDREN = {key(p[:i]): (key(p[:i] + "0"), key(p[:i] + "1")) for p in PROMPTS for i in range(DEPTH)}


@dataclass
class Writer:
    """One worker and what lies in Redis of it."""

    instance: str
    changes: CacheChanges = field(default_factory=CacheChanges)
    cached: dict[bytes, None] = field(default_factory=dict)
    seq: int = 0
    history: dict[int, frozenset[bytes]] = field(default_factory=lambda: {0: frozenset()})
    stream: list[tuple[int, bytes]] = field(default_factory=list)
    snapshot: bytes = b""

    def store(self, keys: list[bytes]) -> None:
        new = [k for k in keys if k not in self.cached]
        self.cached.update(dict.fromkeys(new))
        self.changes.stored(new)

    def evict(self, number: int) -> None:
        """A block without children, as a cache does."""
        leaves = [k for k in self.cached if not self.cached.keys() & set(CHILDREN.get(k, ()))]
        if leaves:
            gone = leaves[number % len(leaves)]
            del self.cached[gone]
            self.changes.evicted([gone])

    def clear(self) -> None:
        self.cached.clear()
        self.changes.cleared()

    def flush(self, snapshot: bool) -> None:
        if self.changes.lost:
            self.seq += 1
            snapshot = True
        entries = encode_entries(self.changes.take())
        for entry in [*entries, MARK] if snapshot else entries:
            self.seq += 1
            self.stream.append((self.seq, entry))
            self.history[self.seq] = frozenset(self.cached)
        if snapshot:
            self.snapshot = encode_snapshot(self.instance, self.seq, self.changes.take_snapshot())


class Interleaving(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.instances = 0
        self.writers = [self.new_writer() for _ in range(WORKERS)]
        self.indexes = [PrefixIndex(), PrefixIndex()]
        self.cursors: list[dict[str, EventCursor]] = [{}, {}]

    def new_writer(self) -> Writer:
        self.instances += 1
        return Writer(f"instance{self.instances}")

    def cursor(self, router: int, writer: Writer) -> EventCursor:
        new = EventCursor(self.indexes[router], writer.instance)
        return self.cursors[router].setdefault(writer.instance, new)

    def read(self, router: int, writer: Writer, entries: list[tuple[int, bytes]]) -> None:
        cursor = self.cursor(router, writer)
        try:
            for seq, entry in entries:
                for _ in cursor.apply_entry(b"%d-0" % seq, {FIELD: entry}):
                    self.indexes[router].sweep(1)
        except MalformedEvents:
            cursor.reset()

    def load(self, router: int, writer: Writer, snapshot: bytes) -> None:
        cursor = self.cursor(router, writer)
        try:
            for _ in cursor.apply_snapshot(snapshot):
                self.indexes[router].sweep(1)
        except MalformedEvents:
            cursor.reset()

    workers = st.integers(0, WORKERS - 1)
    routers = st.integers(0, 1)
    tell = st.sampled_from(["", "changes", "changes", "snapshot"])

    def tell_(self, writer: Writer, what: str) -> None:
        if what:
            writer.flush(what == "snapshot")

    # ---- the worker

    @rule(w=workers, prompt=st.sampled_from(PROMPTS), depth=st.integers(1, DEPTH), tell=tell)
    def stored(self, w: int, prompt: str, depth: int, tell: str) -> None:
        self.writers[w].store([key(prompt[: i + 1]) for i in range(depth)])
        self.tell_(self.writers[w], tell)

    @rule(w=workers, numbers=st.lists(st.integers(0, 30), min_size=1, max_size=4), tell=tell)
    def evicted(self, w: int, numbers: list[int], tell: str) -> None:
        for number in numbers:
            self.writers[w].evict(number)
        self.tell_(self.writers[w], tell)

    @rule(w=workers, tell=tell)
    def cleared(self, w: int, tell: str) -> None:
        self.writers[w].clear()
        self.tell_(self.writers[w], tell)

    @rule(w=workers)
    def lost(self, w: int) -> None:
        self.writers[w].changes.lose()

    @rule(w=workers)
    def restarted(self, w: int) -> None:
        for router in (0, 1):
            self.cursors[router].pop(self.writers[w].instance, None)
            self.indexes[router].clear(self.writers[w].instance)
        self.writers[w] = self.new_writer()

    # ---- Redis

    @rule(w=workers, count=st.integers(1, 3))
    def trimmed(self, w: int, count: int) -> None:
        del self.writers[w].stream[:count]

    @rule(w=workers)
    def flushed(self, w: int) -> None:
        self.writers[w].stream.clear()
        self.writers[w].snapshot = b""

    @rule(router=routers, w=workers, noise=st.binary(max_size=40))
    def garbage_snapshot(self, router: int, w: int, noise: bytes) -> None:
        self.load(router, self.writers[w], noise or self.writers[w].snapshot[:-1])

    @rule(router=routers, w=workers, ahead=st.integers(-1, 2), noise=st.binary(max_size=9))
    def garbage_entry(self, router: int, w: int, ahead: int, noise: bytes) -> None:
        seq = max(self.cursor(router, self.writers[w]).seq + ahead, 0)
        self.read(router, self.writers[w], [(seq, b"\xff" + noise)])

    # ---- the router

    @rule(router=routers, count=st.integers(1, 4))
    def tailed(self, router: int, count: int) -> None:
        for writer in self.writers:
            cursor = self.cursor(router, writer)
            if cursor.needs_snapshot and writer.snapshot:
                self.load(router, writer, writer.snapshot)
            new = [entry for entry in writer.stream if entry[0] > cursor.seq]
            self.read(router, writer, new[:count])

    @rule(router=routers, w=workers, start=st.integers(0, 8), count=st.integers(1, 5))
    def replayed_or_skipped(self, router: int, w: int, start: int, count: int) -> None:
        self.read(router, self.writers[w], self.writers[w].stream[start : start + count])

    @rule(router=routers, budget=st.integers(1, 400))
    def swept(self, router: int, budget: int) -> None:
        self.indexes[router].sweep(budget)

    # ---- what holds

    @invariant()
    def an_index_holds_what_was_cached_at_its_number(self) -> None:
        for router, index in enumerate(self.indexes):
            held = {
                w.instance: w.history[self.cursors[router][w.instance].seq]
                for w in self.writers
                if w.instance in self.cursors[router]
            }
            for chain in CHAINS:
                expected = {i: _walk(chain, keys) for i, keys in held.items()}
                assert index.match(chain) == {i: n for i, n in expected.items() if n}

    def teardown(self) -> None:
        """Redis is well again, and everybody goes on: all is known, and nothing else."""
        for writer in self.writers:
            writer.changes.lose()
            writer.flush(True)
        for router, index in enumerate(self.indexes):
            for writer in self.writers:
                self.load(router, writer, writer.snapshot)
                assert not self.cursor(router, writer).needs_snapshot
                assert self.cursor(router, writer).seq == writer.seq
            self.an_index_holds_what_was_cached_at_its_number()
            while index.sweep(100):
                pass
            assert index.entries == len(set().union(*(w.cached for w in self.writers)))
            assert index._slots.count <= 256 + 2 * WORKERS


def _walk(chain: list[bytes], held: frozenset[bytes]) -> int:
    for depth, block in enumerate(chain):
        if block not in held:
            return depth
    return len(chain)


TestInterleaving = Interleaving.TestCase
