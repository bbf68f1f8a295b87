"""Cache events: what is packed comes back, and nothing else passes."""

from __future__ import annotations

import contextlib
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import MalformedEvents
from protocol.kv_events import (
    ENTRY_KEYS,
    MARK,
    CacheChange,
    CacheChangeKind,
    decode_entry,
    decode_fields,
    decode_snapshot,
    encode_entries,
    encode_snapshot,
    key_batches,
    pack_keys,
    parse_id,
    split_keys,
)


def key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def keys(count: int) -> list[bytes]:
    return [key(i) for i in range(count)]


def told(changes: list[CacheChange]) -> list[tuple[CacheChangeKind, bytes]]:
    """Key by key, which is what must not change."""
    found: list[tuple[CacheChangeKind, bytes]] = []
    for kind, packed in changes:
        if kind is not CacheChangeKind.CLEARED:
            found += [(kind, k) for k in split_keys(packed)]
        elif not found or found[-1][0] is not kind:
            found.append((kind, b""))
    return found


counts = st.one_of(st.integers(1, 5), st.integers(ENTRY_KEYS - 2, 2 * ENTRY_KEYS + 2))
changes = st.builds(
    lambda kind, count: CacheChange(
        kind, b"" if kind is CacheChangeKind.CLEARED else pack_keys(keys(count))
    ),
    *(st.sampled_from(CacheChangeKind), counts),
)


@given(st.lists(changes, max_size=6))
def test_changes_come_back_in_order(given_changes: list[CacheChange]) -> None:
    entries = encode_entries(given_changes)
    decoded = [decode_entry(entry) for entry in entries]
    assert told([c for entry in decoded for c in entry]) == told(given_changes)
    assert all(sum(len(c.packed) // 16 for c in entry) <= ENTRY_KEYS for entry in decoded)
    total = sum(max(len(c.packed) // 16, 1) for c in given_changes)
    assert len(entries) <= total // ENTRY_KEYS + 1


@given(st.binary(max_size=200), st.integers(0, 60))
def test_a_damaged_entry_is_refused_or_well_formed(noise: bytes, cut: int) -> None:
    good = encode_entries([CacheChange(CacheChangeKind.STORED, pack_keys(keys(3)))])[0]
    for data in (noise, MARK + noise, good[:cut] + noise, good + noise):
        with contextlib.suppress(MalformedEvents):
            assert encode_entries(decode_entry(data)) or data == MARK


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\x02", MARK + b"\x01", MARK + b"\x01\0\0\0\0", MARK + b"\x03\x01\0\0\0" + key(1)),
        MARK + b"\x04\x01\0\0\0" + key(1),
        MARK + b"\x01\x02\0\0\0" + key(1),
        MARK + b"\x01\x01\x10\0\0" + pack_keys(keys(ENTRY_KEYS + 1)),
        MARK + b"\x03\0\0\0\0" * (ENTRY_KEYS + 1),
    ],
)
def test_bad_lengths_kinds_and_versions(data: bytes) -> None:
    with pytest.raises(MalformedEvents):
        decode_entry(data)


@pytest.mark.parametrize("fields", [None, {}, {b"x": MARK}, {b"e": MARK, b"f": b""}, [b"e", MARK]])
def test_fields_other_than_one_entry(fields: object) -> None:
    with pytest.raises(MalformedEvents):
        decode_fields(fields)


def test_ids() -> None:
    assert parse_id(b"17-0") == 17
    for bad in (b"17-1", b"17", b"", b"x-0", b"-0", b"1-0-0"):
        with pytest.raises(MalformedEvents):
            parse_id(bad)


@given(st.integers(0, 2**64 - 1), st.integers(0, 40))
def test_a_snapshot_comes_back(seq: int, count: int) -> None:
    snapshot = decode_snapshot("a", encode_snapshot("a", seq, keys(count)))
    assert snapshot.seq == seq
    assert [k for part in key_batches(snapshot.packed, 7) for k in part] == keys(count)


@given(st.data())
def test_a_damaged_or_strange_snapshot_is_refused(data: st.DataObject) -> None:
    good = encode_snapshot("a", 5, keys(4))
    at = data.draw(st.integers(0, len(good) - 1))
    flipped = good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :]
    strange = encode_snapshot("b", 5, keys(4))
    for bad in (flipped, good[:at], good + b"\0" * (at + 1), strange, b""):
        with pytest.raises(MalformedEvents):
            decode_snapshot("a", bad)
