"""A frame that is not exactly the one that is due is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache.kv_format import KVPiece, split_into_pieces
from kvtransfer.frames import HEADER_BYTES, ExpectedFrames, FrameHeader, pack_frame, unpack_frame
from protocol.errors import TransferFailed

TRANSFER = bytes(range(16))
SIZE = 8  # bytes of one layer of one block


def frames(pieces: list[KVPiece]) -> list[bytes]:
    return [
        pack_frame(
            FrameHeader(TRANSFER, i, piece, piece.bytes(SIZE)), bytes([i]) * piece.bytes(SIZE)
        )
        for i, piece in enumerate(pieces)
    ]


def test_frames_in_order_are_taken() -> None:
    pieces = split_into_pieces(2, 9, 3, SIZE, 64)
    expectation = ExpectedFrames(TRANSFER, pieces, SIZE)
    for i, data in enumerate(frames(pieces)):
        assert not expectation.complete
        header, payload = unpack_frame(data)
        expectation.check(header)
        assert bytes(payload) == bytes([i]) * pieces[i].bytes(SIZE)
    assert expectation.complete and len(pieces) > 1


@given(at=st.integers(0, HEADER_BYTES + 23), change=st.integers(1, 255))
def test_any_changed_byte_is_noticed(at: int, change: int) -> None:
    data = bytearray(frames([KVPiece(0, 3, 0, 1)])[0])
    data[at] ^= change
    with pytest.raises(TransferFailed):
        unpack_frame(bytes(data))


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(TransferFailed):
        unpack_frame(data)


@pytest.mark.parametrize("length", [0, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 23])
def test_a_cut_frame_is_refused(length: int) -> None:
    with pytest.raises(TransferFailed):
        unpack_frame(frames([KVPiece(0, 3, 0, 1)])[0][:length])


@pytest.mark.parametrize(
    ("header", "what"),
    [
        (FrameHeader(bytes(16), 0, KVPiece(0, 2, 0, 1), 16), "another transfer"),
        (FrameHeader(TRANSFER, 1, KVPiece(0, 2, 0, 1), 16), "frame 1 came, 0 was due"),
        (FrameHeader(TRANSFER, 0, KVPiece(0, 2, 7, 1), 16), "due was"),
        (FrameHeader(TRANSFER, 0, KVPiece(0, 2, 0, 1), 15), "15 bytes, due were 16"),
        (FrameHeader(TRANSFER, 0, KVPiece(0, 2, 0, 1), 16, codec=1), "codec 1"),
    ],
)
def test_what_is_not_due_is_refused(header: FrameHeader, what: str) -> None:
    with pytest.raises(TransferFailed, match=what):
        ExpectedFrames(TRANSFER, [KVPiece(0, 2, 0, 1)], SIZE).check(header)


def test_a_frame_after_the_last_is_refused() -> None:
    header = FrameHeader(TRANSFER, 0, KVPiece(0, 2, 0, 1), 16)
    expectation = ExpectedFrames(TRANSFER, [KVPiece(0, 2, 0, 1)], SIZE)
    expectation.check(header)
    with pytest.raises(TransferFailed, match="after the last"):
        expectation.check(header)
