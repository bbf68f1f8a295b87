"""Decides when frames of outgoing KV are copied from the pool into shared-memory slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.ipc.messages import KVFrame
from engine.kv_cache.kv_format import Codec, KVPiece

CopyToSlot = Callable[[int, KVPiece, int, Codec], int]
"""Copies (handle, piece, slot, codec) and returns the bytes."""


@dataclass
class _Transfer:
    pieces: deque[KVPiece]
    codec: Codec
    credits: int = 0  # frames that the receiver has granted
    sent: int = 0
    held: int = 0  # slots that the front has not emptied yet


class KVEgress:
    """Owns the outbound slots of one engine. A frame is sent when its blocks are computed, its
    receiver has granted it, and a slot is free. Transfers alternate, and none holds more than an
    equal share of the slots, so that a slow receiver does not delay others."""

    def __init__(self, slots: list[int], copy: CopyToSlot) -> None:
        self._free = list(slots)
        self._total = len(slots)
        self._copy = copy
        self._transfers: dict[int, _Transfer] = {}
        self._holder: dict[int, _Transfer] = {}  # by slot

    def open(self, handle: int, pieces: list[KVPiece], codec: Codec) -> None:
        self._transfers[handle] = _Transfer(deque(pieces), codec)

    def grant(self, handle: int, frames: int) -> None:
        """Allow ``frames`` more frames. Unknown handles belong to transfers that have ended."""
        if (transfer := self._transfers.get(handle)) is not None:
            transfer.credits += frames

    def close(self, handle: int) -> None:
        self._transfers.pop(handle, None)

    def free(self, slots: list[int]) -> None:
        for slot in slots:
            self._holder.pop(slot).held -= 1
        self._free += slots

    def fill_slots(self, computed: Callable[[int], int]) -> list[KVFrame]:
        """Copy all frames that may be sent; ``computed(handle)`` returns the readable blocks."""
        frames: list[KVFrame] = []
        share = max(1, self._total // max(1, len(self._transfers)))
        turn = deque(self._transfers.items())
        while turn and self._free:
            handle, transfer = turn.popleft()
            if not transfer.pieces or not transfer.credits or transfer.held >= share:
                continue
            piece = transfer.pieces[0]
            if piece.block + piece.blocks > computed(handle):
                continue
            frames.append(self._send(handle, transfer))
            turn.append((handle, transfer))
        return frames

    def _send(self, handle: int, transfer: _Transfer) -> KVFrame:
        piece, slot = transfer.pieces.popleft(), self._free.pop()
        nbytes = self._copy(handle, piece, slot, transfer.codec)
        self._holder[slot] = transfer
        sequence = transfer.sent
        transfer.credits -= 1
        transfer.held += 1
        transfer.sent += 1
        return KVFrame(handle, sequence, slot, piece, nbytes, last=not transfer.pieces)
