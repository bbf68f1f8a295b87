"""The frames of one transfer on the receiver's side, as its carrier sees them.

    header --admit--> a granted slot --the carrier writes the payload--> filled --> the engine
    header --ingest_in_place--> the engine reads the payload from a mapped arena

A frame that fails a check never touches a page: headers are checked before a slot is given, and
payloads before the engine hears of them (of a mapped arena by the engine itself).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.frames import (
    ExpectedFrames,
    FrameHeader,
    check_checksum,
    payload_checksum,
    unpack_header,
)
from protocol.errors import TransferFailed

MIN_TIMED_BYTES = 1 << 20
"""Fewer bytes lie in the buffers of a connection before the first one is read."""

SlotView = Callable[[int, int], memoryview]
"""(slot, nbytes) -> the first bytes of that slot of the arena."""

FrameHandler = Callable[[FrameHeader, int], None]
"""Called with (header, slot) on the event loop: a checked frame lies in the slot."""

InPlaceHandler = Callable[[FrameHeader, int, int, int], None]
"""Called with (header, arena, slot, generation) on the event loop: the engine shall read it."""


@dataclass(frozen=True)
class AdmittedFrame:
    """A frame whose header has passed every check, and the slot that its payload goes into."""

    header: FrameHeader
    slot: int  # an inbound slot of the arena of the receiver's engine session
    payload: memoryview  # of the slot: writable, exactly ``header.nbytes`` long


class InboundFrames:
    """The frames of one transfer. ``InboundTransfer`` creates it on the event loop, and adds a slot
    for every credit that it grants. The carrier calls ``admit`` and ``filled`` from any thread,
    also from several at once."""

    def __init__(
        self,
        expected: ExpectedFrames,
        slot_view: SlotView,
        on_frame: FrameHandler,
        on_frame_in_place: InPlaceHandler,
    ) -> None:
        self._expected = expected
        self._slot_view = slot_view
        self._on_frame = on_frame
        self._on_frame_in_place = on_frame_in_place
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._slots: set[int] = set()  # granted, without a frame
        self._filling: set[int] = set()
        self._done = 0
        self._carried_bytes, self._carried_s = 0, 0.0

    @property
    def transfer(self) -> bytes:
        return self._expected.transfer

    @property
    def complete(self) -> bool:
        """Whether every frame has been filled, or ingested in place."""
        return self._done == self._expected.total

    @property
    def carried_bytes_s(self) -> float | None:
        """Bytes per second at which payloads came while they came; None if too few were timed."""
        if self._carried_bytes < MIN_TIMED_BYTES or not self._carried_s:
            return None
        return self._carried_bytes / self._carried_s

    def add_slot(self, slot: int) -> None:
        """Allow one more frame, to be put into ``slot``."""
        with self._lock:
            self._slots.add(slot)

    def unused_slots(self) -> list[int]:
        """Return the slots that were not filled, and admit no further frame. Call it once the link
        is closed: nothing writes to them any more then."""
        with self._lock:
            slots = [*self._slots, *self._filling]
            self._slots.clear()
            self._filling.clear()
        return slots

    def admit(self, header: bytes | memoryview) -> AdmittedFrame:
        """Check a packed header, and take a slot for its payload.

        Raises TransferFailed for a frame that is not due, came twice, or has no credit; the carrier
        then calls ``failed`` of its ``InboundRequest``."""
        unpacked = unpack_header(header)
        self._expected.check(unpacked)
        with self._lock:
            if not self._slots:
                raise TransferFailed(f"frame {unpacked.sequence} came without a credit")
            slot = self._slots.pop()
            self._filling.add(slot)
        return AdmittedFrame(unpacked, slot, self._slot_view(slot, unpacked.nbytes))

    def filled(
        self, frame: AdmittedFrame, checksum: int | None = None, seconds: float = 0.0
    ) -> None:
        """Compare the payload with its checksum, and give the slot to the engine.

        The carrier calls it once for each admitted frame, when the whole payload lies in the slot.
        ``checksum`` is that of the payload if the carrier has computed it already, while the bytes
        came, and ``seconds`` what the payload has taken from its first byte to its last one, as far
        as the carrier knows that. A frame that is never filled gives its slot back after the link
        is closed. Raises TransferFailed for a wrong checksum."""
        if checksum is None:
            checksum = payload_checksum(frame.payload)
        check_checksum(frame.header, checksum)
        with self._lock:
            if frame.slot not in self._filling:  # the transfer has ended in the meantime
                return
            self._filling.remove(frame.slot)
            self._done += 1
            if seconds > 0:
                self._carried_bytes += frame.header.nbytes
                self._carried_s += seconds
        self._loop.call_soon_threadsafe(self._on_frame, frame.header, frame.slot)

    def ingest_in_place(
        self, header: bytes | memoryview, arena: int, slot: int, generation: int, slot_bytes: int
    ) -> FrameHeader:
        """Check a packed header, and let the engine read the payload from a mapped arena.

        For carriers that need no slot here. ``arena`` is a number of ``MapArena``, ``slot`` lies in
        it (the caller has checked) and has ``slot_bytes``, ``generation`` is that of the slot's
        content; the engine checks the checksum. ``InboundLink.on_slot_read`` follows when the
        engine has read it. Event loop only. Raises TransferFailed for a frame that is not due, came
        twice, or is larger than its slot."""
        unpacked = unpack_header(header)
        self._expected.check(unpacked)
        if unpacked.nbytes > slot_bytes:
            raise TransferFailed(f"{unpacked.nbytes} bytes cannot lie in a slot of {slot_bytes}")
        self._done += 1
        self._on_frame_in_place(unpacked, arena, slot, generation)
        return unpacked
