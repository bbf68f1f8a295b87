"""KV frames (kvtransfer/frames.py, inbound_frames.py): any header, in any order, with any slots."""

from __future__ import annotations

import asyncio

from engine.kv_cache.kv_format import Codec, split_into_pieces
from kvtransfer.frames import (
    HEADER_BYTES,
    ExpectedFrames,
    FrameHeader,
    pack_header,
    payload_checksum,
    unpack_header,
)
from kvtransfer.inbound_frames import AdmittedFrame, InboundFrames
from protocol.errors import TransferFailed
from tests.fuzz.byte_reader import ByteReader
from tests.fuzz.target import FuzzTarget
from tests.fuzz.virtual_loop import VirtualLoop

TRANSFER = bytes(range(16))
_SLOT_BYTES = 64
_SIZE = 8  # bytes of one layer of one block
_PIECES = split_into_pieces(0, 7, 3, _SIZE, 48)
_SIZES = [piece.bytes(_SIZE) for piece in _PIECES]


def fuzz_one(data: bytes) -> None:
    """Headers as they are, then headers with a right checksum and one changed byte."""
    _unpack(data[:HEADER_BYTES])
    loop = VirtualLoop()
    try:
        loop.run_until_complete(_transfer(ByteReader(data)))
    finally:
        loop.close()


def _unpack(data: bytes) -> None:
    try:
        header = unpack_header(memoryview(data))
    except TransferFailed:
        return
    # Reserved bytes are not kept, and everything else is.
    assert unpack_header(pack_header(header)) == header


async def _transfer(reader: ByteReader) -> None:
    """One transfer with frames that the input chooses: each piece arrives once at most."""
    handled: list[int] = []
    arena = bytearray(4 * _SLOT_BYTES)

    def view(slot: int, nbytes: int) -> memoryview:
        assert nbytes <= _SLOT_BYTES, "a payload beyond its slot"
        return memoryview(arena)[slot * _SLOT_BYTES : slot * _SLOT_BYTES + nbytes]

    frames = InboundFrames(
        ExpectedFrames(TRANSFER, _PIECES, _SIZES, Codec.RAW),
        view,
        lambda header, slot: handled.append(header.sequence),
        lambda header, arena, slot, generation: handled.append(header.sequence),
    )
    filling: list[AdmittedFrame] = []
    while reader.left:
        _step(frames, reader, filling)
    await asyncio.sleep(0)
    assert len(set(handled)) == len(handled) <= len(_PIECES)
    slots = frames.unused_slots()
    assert len(set(slots)) == len(slots)


def _step(frames: InboundFrames, reader: ByteReader, filling: list[AdmittedFrame]) -> None:
    action = reader.number(5)
    try:
        if action == 0:
            slot = reader.number(4)
            if slot not in frames.unused_slots():
                frames.add_slot(slot)
        elif action == 1:
            filling.append(frames.admit(_header(reader)))
        elif action == 2 and filling:
            frames.filled(filling.pop(), None if reader.number(2) else reader.number(1 << 64))
        elif action == 3:
            frames.ingest_in_place(_header(reader), 1, reader.number(4), 2, _SLOT_BYTES)
        else:
            frames.admit(reader.take(HEADER_BYTES))
    except TransferFailed:
        return


def _header(reader: ByteReader) -> bytes:
    """A header that is due, with changes that the input chooses."""
    number = reader.number(len(_PIECES) + 1)
    place = min(number, len(_PIECES) - 1)
    checksum = payload_checksum(bytes(_SIZES[place]))
    due = FrameHeader(TRANSFER, number, _PIECES[place], _SIZES[place], Codec.RAW, checksum)
    packed = bytearray(pack_header(due))
    if reader.number(4) == 0:
        packed[reader.number(HEADER_BYTES)] ^= reader.number(256)
    return bytes(packed)


TARGET = FuzzTarget("frames", fuzz_one)
