"""Cache events (protocol/kv_events.py, router/placement/index_reader.py): entries and snapshots."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.block_keys import KEY_BYTES
from protocol.errors import MalformedEvents
from protocol.kv_events import (
    FIELD,
    MARK,
    CacheChangeKind,
    decode_entry,
    decode_snapshot,
    encode_entries,
    encode_snapshot,
    split_keys,
)
from router.placement.event_cursor import EventCursor
from router.placement.prefix_index import PrefixIndex
from tests.fuzz.byte_reader import ByteReader
from tests.fuzz.target import Budget, FuzzTarget

_INSTANCE = "a" * 32


def fuzz_one(data: bytes) -> None:
    """The bytes as an entry, as a snapshot, and as what a worker writes over its life."""
    _entry(data)
    _entry(MARK + data)
    _snapshot(data)
    _whole_snapshot(data)
    _life(ByteReader(data))


def _entry(data: bytes) -> None:
    try:
        changes = decode_entry(data)
    except MalformedEvents:
        return
    again = [change for entry in encode_entries(changes) for change in decode_entry(entry)]
    # Neighbours of one kind are joined when they are written again.
    assert _joined(again) == _joined(changes)


def _joined(
    changes: Sequence[tuple[CacheChangeKind, bytes]],
) -> list[tuple[CacheChangeKind, bytes]]:
    joined: list[tuple[CacheChangeKind, bytes]] = []
    for kind, packed in changes:
        if joined and joined[-1][0] is kind:
            joined[-1] = kind, joined[-1][1] + packed
        else:
            joined.append((kind, packed))
    return joined


def _snapshot(data: bytes) -> None:
    try:
        snapshot = decode_snapshot(_INSTANCE, data)
    except MalformedEvents:
        return
    assert encode_snapshot(_INSTANCE, snapshot.seq, split_keys(snapshot.packed)) == data


def _whole_snapshot(data: bytes) -> None:
    keys = split_keys(data[: len(data) // KEY_BYTES * KEY_BYTES])
    snapshot = decode_snapshot(_INSTANCE, encode_snapshot(_INSTANCE, len(data), keys))
    assert split_keys(snapshot.packed) == keys


def _life(reader: ByteReader) -> None:
    """A cursor that reads entries and snapshots; what it refuses has changed nothing."""
    index = PrefixIndex()
    cursor = EventCursor(index, _INSTANCE)
    list(cursor.apply_snapshot(encode_snapshot(_INSTANCE, 1, [])))
    while reader.left:
        seq, held = cursor.seq, index.entries
        try:
            list(_step(cursor, reader))
            assert cursor.seq >= seq
        except MalformedEvents:
            assert (cursor.seq, index.entries) == (seq, held)
            cursor.reset()


def _step(cursor: EventCursor, reader: ByteReader) -> list[int]:
    action = reader.number(4)
    if action == 0:
        return list(cursor.apply_snapshot(reader.piece()))
    if action == 1:
        keys = split_keys(bytes(KEY_BYTES) * reader.number(4))
        number = cursor.seq + reader.number(3)
        return list(cursor.apply_snapshot(encode_snapshot(_INSTANCE, number, keys)))
    if action == 2:
        entry_id = reader.piece(64) * reader.number(200) + reader.piece(4)
        return list(cursor.apply_entry(entry_id, {FIELD: MARK}))
    number = cursor.seq + reader.number(3)
    fields: object = {FIELD: MARK + reader.piece(4000)} if reader.number(8) else {b"x": b""}
    return list(cursor.apply_entry(b"%d-0" % number, fields))


TARGET = FuzzTarget("cache_events", fuzz_one, Budget(s_per_byte=4e-5, bytes_per_byte=1000))
