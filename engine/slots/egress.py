"""Which frame of which transfer is put into the next free outbound slot. Decisions only.

    Skip, Grant (front) -.
    offer (step loop) ----+--> transfer: pieces that are computed and granted --> take --> slot
    computed (step loop) -'

A transfer begins with the first of its messages from the front or from the step loop, in any order,
and is forgotten when both have ended it. The front says how many leading blocks to skip before it
grants the first frame, or the transfer begins with the first block.

Slots belong to the transfers that flow: those with a frame that may be sent now, or with slots that
have not been emptied. None of them holds more than an equal share of the slots, and they alternate,
so that neither a slow receiver nor one that waits for its first block delays another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.kv_cache.kv_format import Codec, KVPiece


class OutgoingFrame(NamedTuple):
    """A frame to be copied into ``slot``; ``pages`` [piece.blocks] hold its KV."""

    handle: int
    sequence: int
    slot: int
    piece: KVPiece
    pages: Sequence[int]
    codec: Codec
    last: bool


@dataclass
class _Outgoing:
    """One prefill or export."""

    split: Callable[[int], Sequence[KVPiece]] | None = None
    skip_blocks: int = 0
    pieces: deque[KVPiece] = field(default_factory=deque)  # those that have not been sent
    codec: Codec = Codec.RAW
    pages: Sequence[int] = ()
    computed: int = 0  # leading blocks that may be read
    credits: int = 0  # frames that the receiver has granted
    sent: int = 0
    held: int = 0  # slots that have not been emptied yet
    ended_by_front: bool = False
    ended_by_loop: bool = False

    def split_again(self) -> None:
        """Split what is offered, from ``skip_blocks`` on."""
        if self.split is not None and not self.sent:
            self.pieces = deque(self.split(self.skip_blocks))

    @property
    def has_frame(self) -> bool:
        """Whether a frame may be sent now."""
        if not self.pieces or not self.credits or self.ended_by_front or self.ended_by_loop:
            return False
        piece = self.pieces[0]
        return piece.block + piece.blocks <= self.computed


class EgressQueue:
    """The outbound slots of one engine and the transfers that want them. The copy thread owns
    it."""

    def __init__(self, slots: Sequence[int]) -> None:
        self._total = len(slots)
        self._free = list(reversed(slots))  # the last one freed is in the cache, and is next
        self._transfers: dict[int, _Outgoing] = {}  # by handle, the next one to send first
        self._holders: dict[int, _Outgoing] = {}  # by slot

    @property
    def transfers(self) -> int:
        """Transfers that have not been forgotten."""
        return len(self._transfers)

    @property
    def held(self) -> int:
        """Slots that hold a frame. Any thread may read it."""
        return self._total - len(self._free)

    # ---- the front --------------------------------------------------------------------------

    def skip(self, handle: int, blocks: int) -> None:
        """Leave the first ``blocks`` out, which the receiver has. Without effect once a frame was
        sent."""
        transfer = self._get(handle)
        transfer.skip_blocks = max(0, blocks)
        transfer.split_again()

    def grant(self, handle: int, frames: int) -> None:
        """Allow ``frames`` more frames."""
        self._get(handle).credits += max(0, frames)

    def end_by_front(self, handle: int) -> None:
        """Send nothing more: the front has no further command about this transfer."""
        self._get(handle).ended_by_front = True
        self._forget_if_ended(handle)

    def free(self, slots: Sequence[int]) -> None:
        """Take back slots that have been emptied."""
        for slot in slots:
            holder = self._holders.pop(slot, None)
            assert holder is not None, f"slot {slot} was freed, but holds no frame"
            holder.held -= 1
            self._free.append(slot)

    # ---- the step loop ----------------------------------------------------------------------

    def offer(self, handle: int, split: Callable[[int], Sequence[KVPiece]], codec: Codec) -> None:
        """Send the pieces that ``split`` returns for the first block to send, in their order, when
        they are computed and granted."""
        transfer = self._get(handle)
        transfer.split, transfer.codec = split, codec
        transfer.split_again()

    def publish(self, handle: int, pages: Sequence[int], computed: int) -> None:
        """Let the first ``computed`` blocks be read, which lie in ``pages``."""
        if (transfer := self._transfers.get(handle)) is not None:
            transfer.pages, transfer.computed = pages, computed

    def end_by_loop(self, handle: int) -> None:
        """Send nothing more: the sequence is gone, and its pages may be used again."""
        self._get(handle).ended_by_loop = True
        self._forget_if_ended(handle)

    def is_open(self, handle: int) -> bool:
        """Return whether a frame of the transfer is still wanted."""
        transfer = self._transfers.get(handle)
        return transfer is not None and not (transfer.ended_by_front or transfer.ended_by_loop)

    # ---- the decision -----------------------------------------------------------------------

    def take(self) -> OutgoingFrame | None:
        """Return the next frame to send, with its slot, or None if there is none now."""
        if not self._free:
            return None
        flowing = sum(t.has_frame or t.held > 0 for t in self._transfers.values())
        share = max(1, self._total // max(1, flowing))
        for handle, transfer in self._transfers.items():
            if transfer.has_frame and transfer.held < share:
                self._transfers[handle] = self._transfers.pop(handle)  # to the end of the queue
                return self._send(handle, transfer)
        return None

    def _send(self, handle: int, transfer: _Outgoing) -> OutgoingFrame:
        piece, slot, sequence = transfer.pieces.popleft(), self._free.pop(), transfer.sent
        self._holders[slot] = transfer
        transfer.credits -= 1
        transfer.held += 1
        transfer.sent += 1
        pages = transfer.pages[piece.block : piece.block + piece.blocks]
        last = not transfer.pieces
        return OutgoingFrame(handle, sequence, slot, piece, pages, transfer.codec, last)

    def _get(self, handle: int) -> _Outgoing:
        return self._transfers.setdefault(handle, _Outgoing())

    def _forget_if_ended(self, handle: int) -> None:
        transfer = self._transfers[handle]
        if transfer.ended_by_front and transfer.ended_by_loop:
            del self._transfers[handle]
