"""The format of a KV frame, and every check of one: a frame is one piece of KV on the wire.

    magic      4s   b"BKV1"
    transfer   16s  drawn by the receiver for each attempt
    sequence   u32  0, 1, 2, ... within the transfer
    layer      u16 } the piece: layers and blocks of the prompt
    layers     u16 }
    block      u32 }
    blocks     u32 }
    codec      u8   engine/kv_cache/kv_format.py
    reserved   3x
    nbytes     u32  of the payload
    checksum   u64  XXH3 of all the above and the payload
    payload

Numbers are little-endian. Both ends derive the same list of pieces from the request, so a frame is
compared with the one piece that is due, not with bounds. ``OutboundTransfer.frames`` packs them;
``KVPull`` checks them with ``unpack_frame`` and ``ExpectedFrames.check``.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec
import xxhash

from engine.kv_cache.kv_format import Codec, KVPiece
from protocol.errors import TransferFailed

_HEAD = struct.Struct("<4s16sIHHIIB3xI")
_SUM = struct.Struct("<Q")
HEADER_BYTES: Final = _HEAD.size + _SUM.size
_MAGIC: Final = b"BKV1"


class FrameHeader(msgspec.Struct, frozen=True):
    """Header of a frame, without magic and checksum."""

    transfer: bytes
    sequence: int
    piece: KVPiece
    nbytes: int
    codec: int = Codec.RAW


def _checksum(head: bytes, payload: memoryview | bytes) -> int:
    digest = xxhash.xxh3_64(head)
    digest.update(payload)
    return int(digest.intdigest())


def pack_frame(header: FrameHeader, payload: memoryview | bytes) -> bytes:
    """Return the frame as bytes; this copies the payload once."""
    p = header.piece
    head = _HEAD.pack(
        _MAGIC,
        header.transfer,
        header.sequence,
        p.layer,
        p.layers,
        p.block,
        p.blocks,
        header.codec,
        len(payload),
    )
    return b"".join((head, _SUM.pack(_checksum(head, payload)), payload))


def unpack_frame(data: bytes) -> tuple[FrameHeader, memoryview]:
    """Return header and payload of a frame. Raises TransferFailed when length, magic or checksum
    are wrong."""
    if len(data) < HEADER_BYTES:
        raise TransferFailed(f"a frame has at least {HEADER_BYTES} bytes, this one {len(data)}")
    view = memoryview(data)
    magic, transfer, sequence, layer, layers, block, blocks, codec, nbytes = _HEAD.unpack_from(view)
    (checksum,) = _SUM.unpack_from(view, _HEAD.size)
    payload = view[HEADER_BYTES:]
    if magic != _MAGIC:
        raise TransferFailed(f"not a KV frame: it starts with {magic!r}, expected {_MAGIC!r}")
    if nbytes != len(payload):
        raise TransferFailed(f"frame {sequence} says {nbytes} bytes and has {len(payload)}")
    if checksum != _checksum(data[: _HEAD.size], payload):
        raise TransferFailed(f"frame {sequence} does not match its checksum")
    piece = KVPiece(layer, layers, block, blocks)
    return FrameHeader(transfer, sequence, piece, nbytes, codec), payload


class ExpectedFrames:
    """The frames that one transfer must bring, in order. ``PrefillRunCall`` creates it; ``KVPull``
    checks every frame with it."""

    def __init__(
        self,
        transfer: bytes,
        pieces: list[KVPiece],
        block_layer_bytes: int,
        codec: Codec = Codec.RAW,
    ) -> None:
        self.transfer = transfer
        self.codec = codec
        self._pieces = pieces
        self._block_layer_bytes = block_layer_bytes
        self._next = 0

    @property
    def total(self) -> int:
        return len(self._pieces)

    @property
    def complete(self) -> bool:
        return self._next == len(self._pieces)

    def check(self, header: FrameHeader) -> None:
        """Accept ``header`` if it is exactly the next frame. Raises TransferFailed otherwise."""
        if header.transfer != self.transfer:
            raise TransferFailed("a frame of another transfer")
        if self.complete:
            raise TransferFailed(f"frame {header.sequence} after the last one")
        if header.sequence != self._next:
            raise TransferFailed(f"frame {header.sequence} came, {self._next} was due")
        due = self._pieces[self._next]
        if header.piece != due:
            raise TransferFailed(f"frame {header.sequence} holds {header.piece}, due was {due}")
        if header.codec != self.codec:
            raise TransferFailed(
                f"frame {header.sequence} has codec {header.codec}, due was {self.codec:d}"
            )
        if header.nbytes != due.bytes(self._block_layer_bytes):
            raise TransferFailed(
                f"frame {header.sequence} has {header.nbytes} bytes, due were"
                f" {due.bytes(self._block_layer_bytes)}"
            )
        self._next += 1
