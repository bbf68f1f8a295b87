"""The format of a KV frame, and every check of one: a frame is one piece of KV on its way.

    magic      4s   b"BKV2"
    transfer   16s  drawn by the receiver for each attempt
    sequence   u32  number of the piece in the transfer's list
    layer      u16 }
    layers     u16 } the piece: layers, blocks of the prompt, and heads (0 heads: all heads of the
    block      u32 } model)
    blocks     u32 }
    head       u16 }
    heads      u16 }
    codec      u8   engine/kv_cache/kv_format.py
    reserved   3x
    nbytes     u32  of the payload
    payload    u64  XXH3 of the payload
    checksum   u64  XXH3 of all the above

Numbers are little-endian. The payload follows the header, or lies in a slot that is named beside
it. Both ends derive the same list of pieces from the request, so a header is compared with the one
piece that has its number, not with bounds. Frames may come in any order, each exactly once. The
header is checked before the payload may go anywhere, and the payload before a page is written.
"""

from __future__ import annotations

import struct
import threading
from typing import Final

import msgspec
import xxhash

from engine.kv_cache.kv_format import Codec, KVPiece
from protocol.errors import TransferFailed

TRANSFER_BYTES: Final = 16
_HEAD = struct.Struct("<4s16sIHHIIHHB3xIQ")
_SUM = struct.Struct("<Q")
HEADER_BYTES: Final = _HEAD.size + _SUM.size
_MAGIC: Final = b"BKV2"


class FrameHeader(msgspec.Struct, frozen=True):
    """Header of a frame, without magic and checksum of its own."""

    transfer: bytes
    sequence: int
    piece: KVPiece
    nbytes: int
    codec: int
    checksum: int  # of the payload: ``payload_checksum``


def payload_checksum(payload: memoryview | bytes | bytearray) -> int:
    """Return the checksum of a payload: XXH3, 64 bits."""
    return int(xxhash.xxh3_64_intdigest(payload))


def pack_header(header: FrameHeader) -> bytes:
    """Return the header as HEADER_BYTES bytes."""
    p = header.piece
    head = _HEAD.pack(
        *(_MAGIC, header.transfer, header.sequence),
        *(p.layer, p.layers, p.block, p.blocks, p.head, p.heads),
        *(header.codec, header.nbytes, header.checksum),
    )
    return head + _SUM.pack(xxhash.xxh3_64_intdigest(head))


def unpack_header(data: memoryview | bytes | bytearray) -> FrameHeader:
    """Return the header. Raises TransferFailed when length, magic or checksum are wrong."""
    if len(data) != HEADER_BYTES:
        raise TransferFailed(f"the header of a frame has {HEADER_BYTES} bytes, not {len(data)}")
    magic, transfer, sequence, *rest = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise TransferFailed(f"not a KV frame: it starts with {magic!r}, expected {_MAGIC!r}")
    layer, layers, block, blocks, head, heads, codec, nbytes, checksum = rest
    if _SUM.unpack_from(data, _HEAD.size)[0] != xxhash.xxh3_64_intdigest(data[: _HEAD.size]):
        raise TransferFailed(f"the header of frame {sequence} does not match its checksum")
    piece = KVPiece(layer, layers, block, blocks, head, heads)
    return FrameHeader(transfer, sequence, piece, nbytes, codec, checksum)


def check_checksum(header: FrameHeader, checksum: int) -> None:
    """Raise TransferFailed unless ``checksum``, of the payload that came, is the header's."""
    if checksum != header.checksum:
        raise TransferFailed(f"the payload of frame {header.sequence} does not match its checksum")


class ExpectedFrames:
    """The frames that one transfer must bring, each once, in any order. ``PrefillRunCall`` creates
    it; ``InboundFrames`` checks every header with it, from any thread."""

    def __init__(
        self, transfer: bytes, pieces: list[KVPiece], sizes: list[int], codec: Codec = Codec.RAW
    ) -> None:
        """``sizes`` are the payload bytes of each piece."""
        assert len(pieces) == len(sizes)
        self.transfer = transfer
        self.codec = codec
        self.pieces = pieces
        self._sizes = sizes
        self._missing = set(range(len(pieces)))
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        return len(self.pieces)

    @property
    def complete(self) -> bool:
        """Whether every header has come."""
        return not self._missing

    def check(self, header: FrameHeader) -> None:
        """Accept ``header`` if it is one of the missing frames. Raises TransferFailed otherwise."""
        if header.transfer != self.transfer:
            raise TransferFailed("a frame of another transfer")
        number = header.sequence
        if number >= self.total:
            raise TransferFailed(f"frame {number} of {self.total}")
        due, size = self.pieces[number], self._sizes[number]
        if header.piece != due:
            raise TransferFailed(f"frame {number} holds {header.piece}, due was {due}")
        if header.codec != self.codec:
            raise TransferFailed(f"frame {number} has codec {header.codec}, not {self.codec:d}")
        if header.nbytes != size:
            raise TransferFailed(f"frame {number} has {header.nbytes} bytes, due were {size}")
        with self._lock:
            if number not in self._missing:
                raise TransferFailed(f"frame {number} was received twice")
            self._missing.remove(number)
