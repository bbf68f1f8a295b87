"""KV on its way out of the pool: which frames of a prefill may be copied into slots now."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.ipc.messages import Frame
from engine.kv_cache.kv_format import Codec, Piece

Copy = Callable[[int, Piece, int, Codec], int]
"""(handle, piece, slot, codec) -> bytes copied."""


@dataclass
class _Transfer:
    pieces: deque[Piece]
    codec: Codec
    credits: int = 0
    sent: int = 0
    held: int = 0  # slots that its receiver's side has not emptied yet


class Egress:
    """Owns the outbound slots. A frame goes out when its blocks are computed, the receiver has
    granted it, and a slot is free. Transfers take turns, and none holds more than its share of
    the slots, so that a slow receiver holds up no other."""

    def __init__(self, slots: list[int], copy: Copy) -> None:
        self._free = list(slots)
        self._total = len(slots)
        self._copy = copy
        self._transfers: dict[int, _Transfer] = {}
        self._holder: dict[int, _Transfer] = {}  # by slot

    def open(self, handle: int, pieces: list[Piece], codec: Codec) -> None:
        self._transfers[handle] = _Transfer(deque(pieces), codec)

    def grant(self, handle: int, frames: int) -> None:
        """Unknown handles are transfers that have ended."""
        if (transfer := self._transfers.get(handle)) is not None:
            transfer.credits += frames

    def close(self, handle: int) -> None:
        self._transfers.pop(handle, None)

    def free(self, slots: list[int]) -> None:
        for slot in slots:
            self._holder.pop(slot).held -= 1
        self._free += slots

    def pump(self, computed: Callable[[int], int]) -> list[Frame]:
        """Fill slots with what may go; ``computed(handle)`` is the number of readable blocks."""
        frames: list[Frame] = []
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

    def _send(self, handle: int, transfer: _Transfer) -> Frame:
        piece, slot = transfer.pieces.popleft(), self._free.pop()
        nbytes = self._copy(handle, piece, slot, transfer.codec)
        self._holder[slot] = transfer
        sequence = transfer.sent
        transfer.credits -= 1
        transfer.held += 1
        transfer.sent += 1
        return Frame(handle, sequence, slot, piece, nbytes, last=not transfer.pieces)
