"""The format in which a worker publishes in Redis what it has cached: encoding and decoding.

Workers write it (cluster/worker/event_log.py), and the prefix index of each router reads it
(router/placement/index_reader.py).

    baton:{cluster}:events:{instance}      stream; ids <seq>-0 from 1, one field ``e``: an entry
    baton:{cluster}:snapshot:{instance}    everything cached as of one sequence number

    entry      version (1 byte), then changes in order:
               kind (1 byte), count (4 bytes), count * 16 bytes of block keys
    snapshot   magic and version (8 bytes), sequence number (8), XXH3 of instance, number and
               keys (8), 16 bytes of each key, parents before children

Numbers are little-endian. An entry without changes is a mark, which carries only its sequence
number. Every snapshot is followed by the mark of its number, so that a reader that has missed
entries notices.
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
"""How long both Redis keys outlive their last renewal by the worker."""

ENTRY_KEYS = 4096
"""Most keys in one entry."""

SNAPSHOT_KEYS = 1 << 22
"""Most keys in a snapshot, which then has 64 MiB."""

FIELD = b"e"
MARK = b"\x01"

_VERSION = 1
_CHANGE = struct.Struct("<BI")
_SNAPSHOT = struct.Struct("<8sQQ")
_MAGIC = b"batonkv1"

SNAPSHOT_HEADER_BYTES = _SNAPSHOT.size
SNAPSHOT_BYTES = _SNAPSHOT.size + SNAPSHOT_KEYS * KEY_BYTES


class CacheChangeKind(IntEnum):
    """What happened to the blocks of a change; CLEARED empties the cache and carries no keys."""

    STORED = 1
    EVICTED = 2
    CLEARED = 3


class CacheChange(NamedTuple):
    """One change of a worker's cache. ``packed`` is the keys, back to back."""

    kind: CacheChangeKind
    packed: bytes = b""


class CacheSnapshot(NamedTuple):
    """Everything that was cached after the entry ``seq``. ``packed`` is the keys, back to back."""

    seq: int
    packed: bytes


def stream_key(cluster: str, instance: str) -> str:
    """Return the Redis key of a worker's stream of changes."""
    return f"baton:{cluster}:events:{instance}"


def snapshot_key(cluster: str, instance: str) -> str:
    """Return the Redis key of a worker's snapshot."""
    return f"baton:{cluster}:snapshot:{instance}"


def split_keys(packed: bytes) -> list[bytes]:
    """Return the keys that lie back to back in ``packed``."""
    return [key for (key,) in struct.iter_unpack(f"{KEY_BYTES}s", packed)]


def key_batches(packed: bytes, keys: int) -> Iterator[list[bytes]]:
    """Yield the keys in ``packed`` in lists of at most ``keys``."""
    for start in range(0, len(packed), keys * KEY_BYTES):
        yield split_keys(packed[start : start + keys * KEY_BYTES])


def encode_entries(changes: Iterable[CacheChange]) -> list[bytes]:
    """Return the changes, in order, as entries of at most ENTRY_KEYS keys each."""
    entries: list[bytes] = []
    parts: list[bytes] = []
    room = ENTRY_KEYS
    for kind, alike in groupby(changes, key=lambda change: change.kind):
        packed = b"".join(change.packed for change in alike)
        for piece in _split_to_fit(packed, room):
            if not room:
                entries.append(MARK + b"".join(parts))
                parts, room = [], ENTRY_KEYS
            count = len(piece) // KEY_BYTES
            parts += (_CHANGE.pack(kind, count), piece)
            room -= max(count, 1)
    if parts:
        entries.append(MARK + b"".join(parts))
    return entries


def _split_to_fit(packed: bytes, room: int) -> Iterator[bytes]:
    """Yield the keys in runs: first one of at most ``room`` keys, then of at most ENTRY_KEYS. No
    keys at all are one empty run."""
    cut = (room or ENTRY_KEYS) * KEY_BYTES
    yield packed[:cut]
    for start in range(cut, len(packed), ENTRY_KEYS * KEY_BYTES):
        yield packed[start : start + ENTRY_KEYS * KEY_BYTES]


def decode_entry(data: bytes) -> list[CacheChange]:
    """Return the changes of an entry. Raises MalformedEvents unless every byte of it is valid."""
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
        if code not in CacheChangeKind._value2member_map_ or (count == 0) != (
            code == CacheChangeKind.CLEARED
        ):
            raise MalformedEvents(f"no change is of kind {code} with {count} keys")
        if keys > ENTRY_KEYS or at + count * KEY_BYTES > len(data):
            raise MalformedEvents(f"{count} keys are too many for the entry or its limit")
        changes.append(CacheChange(CacheChangeKind(code), data[at : at + count * KEY_BYTES]))
        at += count * KEY_BYTES
    return changes


def parse_id(entry_id: bytes) -> int:
    """Return the sequence number of the stream id ``<seq>-0``. Raises MalformedEvents."""
    number, dash, rest = entry_id.partition(b"-")
    # Redis' own numbers have 64 bits. Python refuses to read one of thousands of digits.
    if not (dash and rest == b"0" and number.isdigit() and len(number) <= 20):
        raise MalformedEvents(f"an id of the stream is <seq>-0, not {entry_id[:40]!r}")
    return int(number)


def decode_fields(fields: object) -> list[CacheChange]:
    """Return the changes of a stream entry as redis-py gives it. Raises MalformedEvents."""
    if not isinstance(fields, dict) or fields.keys() != {FIELD}:
        raise MalformedEvents("an entry of the stream has one field, e")
    return decode_entry(fields[FIELD])


def encode_snapshot(instance: str, seq: int, keys: Iterable[bytes]) -> bytes:
    """Return the snapshot of ``keys``, which must be sorted parents before children."""
    packed = b"".join(keys)
    return _SNAPSHOT.pack(_MAGIC, seq, _checksum(instance, seq, packed)) + packed


def check_snapshot_head(head: bytes, size: int) -> None:
    """Raise MalformedEvents unless a snapshot can begin with ``head``, its first
    SNAPSHOT_HEADER_BYTES bytes, and have ``size`` bytes: the rest is not read otherwise."""
    if not SNAPSHOT_HEADER_BYTES <= size <= SNAPSHOT_BYTES or not head.startswith(_MAGIC):
        raise MalformedEvents(f"no snapshot has {size} bytes and begins with {head[:8]!r}")


def decode_snapshot(instance: str, data: bytes) -> CacheSnapshot:
    """Return the snapshot. Raises MalformedEvents unless it is whole and of that instance."""
    if len(data) < _SNAPSHOT.size or (len(data) - _SNAPSHOT.size) % KEY_BYTES:
        raise MalformedEvents(f"no snapshot has {len(data)} bytes")
    magic, seq, checksum = _SNAPSHOT.unpack_from(data)
    packed = data[_SNAPSHOT.size :]
    if magic != _MAGIC or checksum != _checksum(instance, seq, packed):
        raise MalformedEvents(f"not a snapshot of instance {instance}: bad magic or checksum")
    return CacheSnapshot(seq, packed)


def pack_keys(keys: Sequence[bytes]) -> bytes:
    """Return the keys back to back."""
    packed = b"".join(keys)
    assert len(packed) == len(keys) * KEY_BYTES
    return packed


def _checksum(instance: str, seq: int, packed: bytes) -> int:
    digest = xxhash.xxh3_64(instance.encode())
    digest.update(seq.to_bytes(8, "little"))
    digest.update(packed)
    return digest.intdigest()
