"""What a worker has cached, as it is told in Redis: both sides of the schema.

    baton:{cluster}:events:{instance}      stream; ids <seq>-0 from 1, one field ``e``: an entry
    baton:{cluster}:snapshot:{instance}    everything cached as of one sequence number

    entry      version (1 byte), then changes in order:
               kind (1 byte), count (4 bytes), count * 16 bytes of block keys
    snapshot   magic and version (8 bytes), sequence number (8), XXH3 of instance, number and
               keys (8), 16 bytes of each key, parents before children

Numbers are little-endian. An entry without changes is a mark: it carries nothing but its number.
Every snapshot is followed by the mark of its number, so that who missed something notices.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import groupby
from typing import NamedTuple

import xxhash

from protocol.block_keys import KEY_BYTES
from protocol.errors import MalformedEvents

EXPIRE_MS = 30_000
"""Both keys outlive the last renewal by their worker for this long."""

ENTRY_KEYS = 4096
"""Keys in one entry at most."""

SNAPSHOT_KEYS = 1 << 22
"""Keys in a snapshot at most: 64 MiB."""

FIELD = b"e"
MARK = b"\x01"

_VERSION = 1
_CHANGE = struct.Struct("<BI")
_SNAPSHOT = struct.Struct("<8sQQ")
_MAGIC = b"batonkv1"

SNAPSHOT_HEADER_BYTES = _SNAPSHOT.size
SNAPSHOT_BYTES = _SNAPSHOT.size + SNAPSHOT_KEYS * KEY_BYTES


class Kind(IntEnum):
    STORED = 1
    EVICTED = 2
    CLEARED = 3


class Change(NamedTuple):
    """One change of a worker's cache. ``packed``: the keys back to back."""

    kind: Kind
    packed: bytes = b""


class Snapshot(NamedTuple):
    """All that was cached when the change ``seq`` had been made."""

    seq: int
    packed: bytes


def stream_key(cluster: str, instance: str) -> str:
    return f"baton:{cluster}:events:{instance}"


def snapshot_key(cluster: str, instance: str) -> str:
    return f"baton:{cluster}:snapshot:{instance}"


def split_keys(packed: bytes) -> list[bytes]:
    return [key for (key,) in struct.iter_unpack(f"{KEY_BYTES}s", packed)]


def portions(packed: bytes, keys: int) -> Iterator[list[bytes]]:
    """The keys, at most ``keys`` at a time."""
    for start in range(0, len(packed), keys * KEY_BYTES):
        yield split_keys(packed[start : start + keys * KEY_BYTES])


def encode_entries(changes: Iterable[Change]) -> list[bytes]:
    """The changes in as few entries as their limit allows, in order."""
    entries: list[bytes] = []
    parts: list[bytes] = []
    room = ENTRY_KEYS
    for kind, alike in groupby(changes, key=lambda change: change.kind):
        packed = b"".join(change.packed for change in alike)
        for piece in _pieces(packed, room):
            if not room:
                entries.append(MARK + b"".join(parts))
                parts, room = [], ENTRY_KEYS
            count = len(piece) // KEY_BYTES
            parts += (_CHANGE.pack(kind, count), piece)
            room -= max(count, 1)
    if parts:
        entries.append(MARK + b"".join(parts))
    return entries


def _pieces(packed: bytes, room: int) -> Iterator[bytes]:
    """At most ``room`` keys, then at most as many as an entry takes; once where there are none."""
    cut = (room or ENTRY_KEYS) * KEY_BYTES
    yield packed[:cut]
    for start in range(cut, len(packed), ENTRY_KEYS * KEY_BYTES):
        yield packed[start : start + ENTRY_KEYS * KEY_BYTES]


def decode_entry(data: bytes) -> list[Change]:
    """Raises MalformedEvents unless ``data`` is an entry from its first byte to its last."""
    if data[:1] != MARK:
        raise MalformedEvents(f"an entry starts with version {_VERSION}, not {data[:1]!r}")
    changes = []
    at, keys = 1, 0
    while at < len(data):
        if at + _CHANGE.size > len(data):
            raise MalformedEvents("an entry ends within the head of a change")
        code, count = _CHANGE.unpack_from(data, at)
        at += _CHANGE.size
        keys += max(count, 1)
        if code not in Kind._value2member_map_ or (count == 0) != (code == Kind.CLEARED):
            raise MalformedEvents(f"no change is of kind {code} with {count} keys")
        if keys > ENTRY_KEYS or at + count * KEY_BYTES > len(data):
            raise MalformedEvents(f"{count} keys are too many for the entry or its limit")
        changes.append(Change(Kind(code), data[at : at + count * KEY_BYTES]))
        at += count * KEY_BYTES
    return changes


def parse_id(entry_id: bytes) -> int:
    """Sequence number of ``<seq>-0``. Raises MalformedEvents."""
    number, dash, rest = entry_id.partition(b"-")
    if not (dash and rest == b"0" and number.isdigit()):
        raise MalformedEvents(f"an id of the stream is <seq>-0, not {entry_id[:40]!r}")
    return int(number)


def decode_fields(fields: object) -> list[Change]:
    """The changes of a stream's entry as the client gives it. Raises MalformedEvents."""
    if not isinstance(fields, dict) or fields.keys() != {FIELD}:
        raise MalformedEvents("an entry of the stream has one field, e")
    return decode_entry(fields[FIELD])


def encode_snapshot(instance: str, seq: int, keys: Iterable[bytes]) -> bytes:
    packed = b"".join(keys)
    return _SNAPSHOT.pack(_MAGIC, seq, _checksum(instance, seq, packed)) + packed


def decode_snapshot(instance: str, data: bytes) -> Snapshot:
    """Raises MalformedEvents unless it is a whole snapshot of that very instance."""
    if len(data) < _SNAPSHOT.size or (len(data) - _SNAPSHOT.size) % KEY_BYTES:
        raise MalformedEvents(f"no snapshot has {len(data)} bytes")
    magic, seq, checksum = _SNAPSHOT.unpack_from(data)
    packed = data[_SNAPSHOT.size :]
    if magic != _MAGIC or checksum != _checksum(instance, seq, packed):
        raise MalformedEvents(f"not a snapshot of instance {instance}: bad magic or checksum")
    return Snapshot(seq, packed)


def pack_keys(keys: Sequence[bytes]) -> bytes:
    packed = b"".join(keys)
    assert len(packed) == len(keys) * KEY_BYTES
    return packed


def _checksum(instance: str, seq: int, packed: bytes) -> int:
    digest = xxhash.xxh3_64(instance.encode())
    digest.update(seq.to_bytes(8, "little"))
    digest.update(packed)
    return digest.intdigest()
