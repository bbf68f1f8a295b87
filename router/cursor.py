"""How far one worker's events were read, and what they do to the index. Knows no Redis.

    wanting --snapshot, newer than what was read--> tailing --number missing--> wanting
       ^                                               |
       +------------ garbage: nothing is held ---------+

While a number is missing the index keeps what it has: a hint is better than none.
"""

from __future__ import annotations

from collections.abc import Iterator

from protocol.events import (
    ENTRY_KEYS,
    Kind,
    decode_fields,
    decode_snapshot,
    parse_id,
    portions,
    split_keys,
)
from router.index import PrefixIndex


class Cursor:
    """One worker instance. ``seq``: number of the last change that is in the index.

    ``entry`` and ``snapshot`` work while they are iterated over, and yield after each portion how
    many keys it had, so that others can run in between. Both raise MalformedEvents before they
    change anything; the caller then calls ``drop``."""

    def __init__(self, index: PrefixIndex, instance: str) -> None:
        self.instance = instance
        self.seq = 0
        self.wanting = True
        self._index = index

    def entry(self, entry_id: bytes, fields: object) -> Iterator[int]:
        """An entry of the stream. What was read before is passed over."""
        seq = parse_id(entry_id)
        if self.wanting or seq <= self.seq:
            return
        if seq != self.seq + 1:
            self.wanting = True
            return
        for kind, packed in decode_fields(fields):
            keys = split_keys(packed)
            if kind is Kind.STORED:
                self._index.store(self.instance, keys)
            elif kind is Kind.EVICTED:
                self._index.evict(self.instance, keys)
            else:
                self._index.clear(self.instance)
            yield len(keys)
        self.seq = seq

    def snapshot(self, data: bytes) -> Iterator[int]:
        """The snapshot as it is in Redis. One that is not newer changes nothing: still wanting."""
        snapshot = decode_snapshot(self.instance, data)
        if snapshot.seq <= self.seq:
            return
        self._index.clear(self.instance)
        for keys in portions(snapshot.packed, ENTRY_KEYS):
            self._index.store(self.instance, keys)
            yield len(keys)
        self.seq = snapshot.seq
        self.wanting = False

    def drop(self) -> None:
        """What came is garbage: hold nothing, start again from any snapshot."""
        self._index.clear(self.instance)
        self.seq = 0
        self.wanting = True
