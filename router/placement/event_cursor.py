"""Applies the cache events of one worker to the prefix index, in order and without gaps.

``IndexReader`` has one cursor for each worker, and reads from Redis what the cursor is given.
"""

from __future__ import annotations

from collections.abc import Iterator

from protocol.kv_events import (
    ENTRY_KEYS,
    CacheChangeKind,
    decode_fields,
    decode_snapshot,
    key_batches,
    parse_id,
    split_keys,
)
from router.placement.prefix_index import PrefixIndex


class EventCursor:
    """Position in the events of one worker, and their effect on the index. Does not know Redis.

        needs snapshot --snapshot, newer than what was read--> tailing --missing number--> needs
        snapshot
            ^                                                     |
            +------------- garbage: the entries are dropped ------+

    ``seq`` is the number of the last change in the index. While a number is missing the index keeps
    what it has: a hint is better than none. ``apply_entry`` and ``apply_snapshot`` are generators
    that yield the number of keys after each portion, so that other tasks can run in between. Both
    raise MalformedEvents before they change anything; the caller then calls ``reset``.
    """

    def __init__(self, index: PrefixIndex, instance: str) -> None:
        self.instance = instance
        self.seq = 0
        self.needs_snapshot = True
        self._index = index

    def apply_entry(self, entry_id: bytes, fields: object) -> Iterator[int]:
        """Apply an entry of the stream; one that was read before is skipped."""
        seq = parse_id(entry_id)
        if self.needs_snapshot or seq <= self.seq:
            return
        if seq != self.seq + 1:
            self.needs_snapshot = True
            return
        for kind, packed in decode_fields(fields):
            keys = split_keys(packed)
            if kind is CacheChangeKind.STORED:
                self._index.store(self.instance, keys)
            elif kind is CacheChangeKind.EVICTED:
                self._index.evict(self.instance, keys)
            else:
                self._index.clear(self.instance)
            yield len(keys)
        self.seq = seq

    def apply_snapshot(self, data: bytes) -> Iterator[int]:
        """Apply a snapshot; one that is not newer changes nothing, and a snapshot is still
        needed."""
        snapshot = decode_snapshot(self.instance, data)
        if snapshot.seq <= self.seq:
            return
        self._index.clear(self.instance)
        for keys in key_batches(snapshot.packed, ENTRY_KEYS):
            self._index.store(self.instance, keys)
            yield len(keys)
        self.seq = snapshot.seq
        self.needs_snapshot = False

    def reset(self) -> None:
        """Drop the worker's entries after garbage; start again from any snapshot."""
        self._index.clear(self.instance)
        self.seq = 0
        self.needs_snapshot = True
