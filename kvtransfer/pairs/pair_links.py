"""Both ends of one transfer by pairs. ``NcclCarrier`` creates them; event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from kvtransfer.carrier import FRAME_SEND_S, InboundRequest, OutboundFrame
from kvtransfer.inbound_frames import AdmittedFrame, InboundFrames
from kvtransfer.pairs.inbound_pairs import InboundPairs
from kvtransfer.pairs.outbound_pairs import OutboundPairs
from protocol.errors import CarrierFailed, TransferFailed
from protocol.wire import wire_pb2 as pb


class PairInboundLink:
    """D's end. ``checks`` runs what compares payloads with their checksums."""

    def __init__(self, request: InboundRequest, pairs: InboundPairs, checks: Executor) -> None:
        self.transfer = request.transfer
        self.peer = request.address
        self._request = request
        self._pairs = pairs
        self._checks = checks
        self._frames: InboundFrames | None = None
        self._admitted: dict[int, AdmittedFrame] = {}
        self._checking: set[asyncio.Task[None]] = set()
        self._broken = False
        self._number = pairs.add(self)

    def receive(self, frames: InboundFrames) -> None:
        self._frames = frames

    def on_filled(self, slots: Sequence[pb.FilledSlot]) -> None:
        if self._frames is None:
            raise TransferFailed("slots were filled before a credit was granted")
        for filled in slots:
            frame = self._frames.admit(filled.header)
            if self._broken:
                continue
            self._admitted[frame.header.sequence] = frame
            self._pairs.want(self, frame.header.sequence)

    def on_pair_message(self, message: pb.PairMessage) -> None:
        """P has said something about a pair."""
        self._pairs.deliver(self, message)

    def on_slot_read(self, sequence: int) -> None:
        raise AssertionError("no frame is read in place")

    async def close(self) -> None:
        await self._pairs.remove(self, self._number)
        if self._checking:
            await asyncio.wait(self._checking)

    # ---- called by InboundPairs -------------------------------------------------------------

    def place_of(self, sequence: int) -> tuple[int, int]:
        frame = self._admitted[sequence]
        return frame.slot, frame.header.nbytes

    def say(self, message: pb.PairMessage) -> None:
        self._request.say(pb.PrefillCall(pair=message))

    def arrived(self, sequence: int) -> None:
        taken = pb.PrefillCall.Taken(sequences=[sequence])
        self._request.say(pb.PrefillCall(taken=taken))
        task = asyncio.create_task(self._check(self._admitted.pop(sequence)))
        self._checking.add(task)
        task.add_done_callback(self._checking.discard)

    def fail(self, error: CarrierFailed) -> None:
        self._broken = True
        self._request.failed(error)

    async def _check(self, frame: AdmittedFrame) -> None:
        assert self._frames is not None
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._checks, self._frames.filled, frame)
        except TransferFailed as error:
            self._request.failed(error)


@dataclass
class _WaitingFrame:
    frame: OutboundFrame
    put_at: float
    sending: set[str] = field(default_factory=set)  # pairs for which the engine reads the slot
    done: bool = False  # taken, or not needed any more


class PairOutboundLink:
    """P's end: says which frames lie in slots, and keeps each until it is taken and not sent."""

    def __init__(
        self, owner: str, pairs: OutboundPairs, say: Callable[[pb.PrefillEvent], None]
    ) -> None:
        self.owner = owner
        self._pairs = pairs
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, _WaitingFrame] = {}  # by sequence
        self._taken_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False
        self._number = pairs.add(self)

    def put(self, frame: OutboundFrame) -> None:
        if self._ended:
            frame.release()
            return
        if frame.sequence in self._waiting:
            frame.release()  # a fault of the engine, which the other end finds by the header
        else:
            self._waiting[frame.sequence] = _WaitingFrame(frame, self._loop.time())
        if self._timer is None:
            self._timer = self._loop.call_later(FRAME_SEND_S, self._check_age)
        filled = pb.FilledSlot(header=frame.header, slot=frame.slot, generation=frame.generation)
        self._say(pb.PrefillEvent(filled=pb.PrefillEvent.Filled(slots=[filled])))

    def taken(self, sequences: Sequence[int]) -> None:
        self._taken_at = self._loop.time()
        for sequence in sequences:
            entry = self._waiting.get(sequence)
            if entry is not None and not entry.done:
                self._finish(sequence, entry)
            elif not self._ended:
                raise TransferFailed(f"frame {sequence} was taken, and no slot holds it")

    def on_pair_message(self, message: pb.PairMessage) -> None:
        """D has said something about a pair. Raises TransferFailed for what it may not say."""
        if not self._ended:
            self._pairs.on_message(self, self._number, message)

    def close(self) -> None:
        self._ended = True
        self._pairs.remove(self._number)
        if self._timer is not None:
            self._timer.cancel()
        for sequence, entry in list(self._waiting.items()):
            self._finish(sequence, entry)

    def _finish(self, sequence: int, entry: _WaitingFrame) -> None:
        """Release the slot now, or when the engine has sent it."""
        entry.done = True
        if not entry.sending or not self._pairs.alive:
            del self._waiting[sequence]
            entry.frame.release()

    def _check_age(self) -> None:
        """Give up the transfer of a receiver that has slots to read, and has read none for too
        long."""
        self._timer = None
        oldest = min((e.put_at for e in self._waiting.values()), default=None)
        if oldest is None:
            return
        left = max(oldest, self._taken_at) + FRAME_SEND_S - self._loop.time()
        if left <= 0:
            self.close()
        else:
            self._timer = self._loop.call_later(left, self._check_age)

    # ---- called by OutboundPairs ------------------------------------------------------------

    def begin_send(self, sequence: int, pair: str) -> tuple[int, int]:
        entry = self._waiting.get(sequence)
        if entry is None or entry.done or pair in entry.sending:
            raise TransferFailed(f"frame {sequence} was asked for, and does not wait")
        entry.sending.add(pair)
        return entry.frame.slot, len(entry.frame.payload)

    def end_send(self, sequence: int, pair: str) -> None:
        entry = self._waiting.get(sequence)
        if entry is not None:
            entry.sending.discard(pair)
            if entry.done:
                self._finish(sequence, entry)

    def say(self, message: pb.PairMessage) -> None:
        if not self._ended:
            self._say(pb.PrefillEvent(pair=message))
