"""P's end of a transfer whose slots the receiver reads itself (the slot carriers)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvtransfer.carrier import FRAME_SEND_S, OutboundFrame
from protocol.errors import TransferFailed
from protocol.wire import wire_pb2 as pb


class SlotOutboundLink:
    """Says which slots hold which frames, and releases them when the receiver has taken them. The
    carrier creates it, and ``PrefillService`` closes it. Event loop only."""

    def __init__(self, say: Callable[[pb.PrefillEvent], None]) -> None:
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, tuple[OutboundFrame, float]] = {}  # by sequence; put when
        self._timer: asyncio.TimerHandle | None = None
        self._filled: list[pb.FilledSlot] = []  # not said yet
        self._taken_at = 0.0
        self._ended = False

    def put(self, frame: OutboundFrame) -> None:
        if self._ended:
            frame.release()
            return
        if (earlier := self._waiting.get(frame.sequence)) is not None:
            earlier[0].release()
        self._waiting[frame.sequence] = frame, self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(FRAME_SEND_S, self._check_age)
        if not self._filled:
            self._loop.call_soon(self._say_filled)
        self._filled.append(
            pb.FilledSlot(header=frame.header, slot=frame.slot, generation=frame.generation)
        )

    def _say_filled(self) -> None:
        """Send the slots of one turn of the event loop as one message, which costs as much as the
        copy of 1 MiB."""
        filled, self._filled = self._filled, []
        if filled and not self._ended:
            self._say(pb.PrefillEvent(filled=pb.PrefillEvent.Filled(slots=filled)))

    def taken(self, sequences: Sequence[int]) -> None:
        self._taken_at = self._loop.time()
        for sequence in sequences:
            entry = self._waiting.pop(sequence, None)
            if entry is not None:
                entry[0].release()
            elif not self._ended:
                raise TransferFailed(f"frame {sequence} was taken, and no slot holds it")

    def close(self) -> None:
        """Release every slot, also one that is being read: what is read of it then does not match
        the checksum of the frame."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        waiting, self._waiting = self._waiting, {}
        for frame, _ in waiting.values():
            frame.release()

    def _check_age(self) -> None:
        """Give up the transfer of a receiver that has slots to read, and has read none for too
        long."""
        self._timer = None
        oldest = next(iter(self._waiting.values()), None)
        if oldest is None:
            return
        left = max(oldest[1], self._taken_at) + FRAME_SEND_S - self._loop.time()
        if left <= 0:
            self.close()
        else:
            self._timer = self._loop.call_later(left, self._check_age)
