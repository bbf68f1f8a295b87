"""A frame that is not exactly one that is missing is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.kv_cache.kv_format import Codec, KVPiece, split_into_pieces
from kvtransfer.frames import (
    HEADER_BYTES,
    ExpectedFrames,
    FrameHeader,
    check_checksum,
    pack_header,
    payload_checksum,
    unpack_header,
)
from protocol.errors import TransferFailed

TRANSFER = bytes(range(16))
SIZE = 8  # bytes of one layer of one block


def headers(pieces: list[KVPiece]) -> list[FrameHeader]:
    return [
        FrameHeader(TRANSFER, i, piece, piece.bytes(SIZE), Codec.RAW, i * 7)
        for i, piece in enumerate(pieces)
    ]


def expected(pieces: list[KVPiece]) -> ExpectedFrames:
    return ExpectedFrames(TRANSFER, pieces, [piece.bytes(SIZE) for piece in pieces])


ONE = headers([KVPiece(0, 2, 0, 1)])[0]
HEADS = replace(ONE, piece=KVPiece(3, 2, 1 << 20, 5, 8, 4), checksum=(1 << 64) - 1)


@pytest.mark.parametrize("header", [ONE, HEADS])
def test_a_header_survives_the_wire(header: FrameHeader) -> None:
    packed = pack_header(header)
    assert len(packed) == HEADER_BYTES
    assert unpack_header(memoryview(packed)) == header


@given(order=st.permutations(range(5)))
def test_frames_are_taken_in_any_order_each_once(order: list[int]) -> None:
    pieces = split_into_pieces(2, 9, 3, SIZE, 48)
    frames, expectation = headers(pieces), expected(pieces)
    assert len(frames) == len(order) - 1 or len(frames) > 1
    for i in order[: len(frames)]:
        if i < len(frames):
            expectation.check(frames[i])
            with pytest.raises(TransferFailed, match="twice"):
                expectation.check(frames[i])
    for i in set(range(len(frames))) - set(order[: len(frames)]):
        assert not expectation.complete
        expectation.check(frames[i])
    assert expectation.complete and expectation.total == len(frames)


@given(at=st.integers(0, HEADER_BYTES - 1), change=st.integers(1, 255))
def test_any_changed_byte_of_a_header_is_noticed(at: int, change: int) -> None:
    data = bytearray(pack_header(HEADS))
    data[at] ^= change
    with pytest.raises(TransferFailed):
        unpack_header(data)


@given(payload=st.binary(min_size=1, max_size=200), change=st.integers(1, 255), data=st.data())
def test_any_changed_byte_of_a_payload_is_noticed(
    payload: bytes, change: int, data: st.DataObject
) -> None:
    header = replace(ONE, checksum=payload_checksum(payload))
    check_checksum(header, payload_checksum(memoryview(payload)))
    changed = bytearray(payload)
    changed[data.draw(st.integers(0, len(payload) - 1))] ^= change
    with pytest.raises(TransferFailed, match="checksum"):
        check_checksum(header, payload_checksum(changed))


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(TransferFailed):
        unpack_header(data)


@pytest.mark.parametrize("length", [0, HEADER_BYTES - 1, HEADER_BYTES + 1])
def test_a_header_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(TransferFailed, match="bytes"):
        unpack_header((pack_header(ONE) + b"x")[:length])


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"transfer": bytes(16)}, "another transfer"),
        ({"sequence": 1}, "frame 1 of 1"),
        ({"piece": KVPiece(0, 2, 7, 1)}, "due was"),
        ({"piece": KVPiece(0, 2, 0, 1, 0, 4)}, "due was"),
        ({"nbytes": 15}, "15 bytes, due were 16"),
        ({"codec": 1}, "codec 1"),
    ],
)
def test_what_is_not_due_is_refused(changes: dict[str, object], what: str) -> None:
    expectation = expected([KVPiece(0, 2, 0, 1)])
    with pytest.raises(TransferFailed, match=what):
        expectation.check(replace(ONE, **changes))
    expectation.check(ONE)
