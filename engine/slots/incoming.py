"""Frames on their way from slots into the pool.

    Ingest --> queued --staging slot--> fetching --passed--> written: SlotsFree
                 |       `--peer's slot copied: SlotRead   `--defect--> ReceiveFailed
                 `--sequence gone--> SlotsFree or SlotRead

A frame is checked before it touches a page. ``Join`` and ``EndImport`` wait until all frames of
their sequence are written. Frames may be written in any order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch import Tensor

from engine.ipc import messages as m
from engine.kv_cache.kv_format import KVFormat
from engine.kv_cache.kv_frames import FrameCopy, FrameDefect, frame_refusal
from engine.kv_cache.page_lease import PageLease
from engine.slots.devices import CopyCompletion, CopyDevice, Fetch, HostFrame
from engine.slots.peer_slots import PeerSlots
from protocol.errors import CarrierFailed, TransferFailed

Waiting: TypeAlias = m.Join | m.EndImport


class RejectedSequence(NamedTuple):
    """A sequence whose KV is invalid. The front has been told."""

    handle: int


LoopItem: TypeAlias = m.Join | m.EndImport | RejectedSequence
"""What the step loop has to apply."""


@dataclass
class _Expected:
    lease: PageLease
    fence: CopyCompletion  # of the steps that may still touch the pages
    waiting: Waiting | None = None
    failed: bool = False

    @property
    def is_over(self) -> bool:
        return self.lease.revoked or self.failed


class _Batch(NamedTuple):
    fetch: Fetch
    commands: list[m.Ingest]
    staging: list[int]


class IncomingFrames:
    """The frames that come into one pool. The copy thread owns it. ``slots`` [slots, >= slot_bytes]
    uint8 is the arena; ``send`` sends an event, and ``give`` hands work to the step loop."""

    def __init__(
        self,
        kv: KVFormat,
        device: CopyDevice,
        slots: Tensor,
        send: Callable[[m.Event], None],
        give: Callable[[LoopItem], None],
    ) -> None:
        self._kv = kv
        self._device = device
        self._slots = slots
        self._send = send
        self._give = give
        self.peers = PeerSlots()
        self._private = device.private_slots()
        self._expected: dict[int, _Expected] = {}  # by handle
        self._queued: deque[m.Ingest] = deque()
        self._free = list(range(device.inbound_slots))  # of staging memory
        self._batches: deque[_Batch] = deque()

    @property
    def sequences(self) -> int:
        """Sequences that are known here."""
        return len(self._expected)

    @property
    def queued(self) -> int:
        """Frames that are not on their way yet."""
        return len(self._queued)

    def running(self) -> CopyCompletion | None:
        """Return the oldest copy in flight."""
        return self._batches[0].fetch if self._batches else None

    # ---- sequences --------------------------------------------------------------------------

    def expect(self, lease: PageLease, fence: CopyCompletion) -> None:
        """Write the frames of ``lease.handle`` once ``fence`` is complete. Sequences whose leases
        have ended are forgotten."""
        for handle in [h for h, e in self._expected.items() if e.lease.revoked]:
            del self._expected[handle]
        self._expected[lease.handle] = _Expected(lease, fence)

    def wait(self, command: Waiting) -> None:
        """Give ``command`` to the step loop when its frames are written."""
        entry = self._expected.get(command.handle)
        if entry is not None and not entry.is_over:  # else the command is gone with its sequence
            entry.waiting = command
            self._release(entry)

    def _release(self, entry: _Expected) -> None:
        if entry.waiting is not None and entry.lease.frames >= entry.waiting.frames:
            self._give(entry.waiting)
            entry.waiting = None

    # ---- frames -----------------------------------------------------------------------------

    def ingest(self, command: m.Ingest) -> None:
        self._queued.append(command)

    def advance(self) -> bool:
        """Fetch frames into staging memory, and write those that are there. Return whether anything
        was done."""
        return bool(self._fetch_queued()) | bool(self._write_fetched())

    def _fetch_queued(self) -> int:
        """Fetch a batch of queued frames. Return how many left the queue."""
        commands: list[m.Ingest] = []
        kept: list[m.Ingest] = []
        before = len(self._queued)
        while self._queued and len(commands) < min(len(self._free), self._device.batch):
            command = self._queued.popleft()
            entry = self._expected.get(command.handle)
            if entry is not None and not entry.is_over and not entry.fence.is_done():
                kept.append(command)
            elif (problem := self._problem(command, entry)) is not None:
                self._end(command, problem)
            else:
                commands.append(command)
        self._queued.extendleft(reversed(kept))
        staged = [(c, slot) for c in commands if (slot := self._stage(c)) is not None]
        if staged:
            frames = [
                HostFrame(self._bytes_of(c, slot), FrameCopy(slot, c.piece, (), c.codec))
                for c, slot in staged
            ]
            fetch = self._device.fetch(frames)
            self._batches.append(_Batch(fetch, [c for c, _ in staged], [s for _, s in staged]))
        return before - len(self._queued)

    def _problem(self, command: m.Ingest, entry: _Expected | None) -> str | None:
        """Return why a frame cannot be written, empty if its sequence is gone, or None."""
        if entry is None or entry.is_over:
            return ""
        kv, piece = self._kv, command.piece
        heads = piece.heads or kv.model_heads
        fits = (
            0 <= piece.layer < piece.layer + piece.layers <= kv.layers
            and kv.first_head <= piece.head < piece.head + heads <= kv.first_head + kv.kv_heads
            and entry.lease.covers(piece)
            and command.codec in kv.codecs
            and command.nbytes == kv.piece_bytes(piece, command.codec) <= self._slots.shape[1]
        )
        return None if fits else f"a frame of {command.nbytes} bytes does not fit: {piece}"

    def _stage(self, command: m.Ingest) -> int | None:
        """Take a staging slot for a frame. A frame of another arena is copied to private memory
        now; None if that fails."""
        slot = self._free.pop()
        if command.arena:
            try:
                self.peers.copy(command, self._bytes_of(command, slot).numpy())
            except TransferFailed as error:
                self._free.append(slot)
                self._end(command, str(error), by_carrier=isinstance(error, CarrierFailed))
                return None
            self._send(m.SlotRead(command.handle, command.sequence))
        return slot

    def _bytes_of(self, command: m.Ingest, staging: int) -> Tensor:
        """Return the host memory [nbytes] that a frame is fetched from."""
        rows = self._private[staging] if command.arena else self._slots[command.slot]
        return rows[: command.nbytes]

    def _write_fetched(self) -> int:
        """Write the frames of all complete fetches. Return the number of fetches."""
        count = 0
        while self._batches and self._batches[0].fetch.is_done():
            batch = self._batches.popleft()
            defects = batch.fetch.defects()
            for command, slot, found in zip(batch.commands, batch.staging, defects, strict=True):
                problem = str(frame_refusal(FrameDefect(found))) if found else None
                self._finish(command, slot, problem)
            count += 1
        return count

    def _finish(self, command: m.Ingest, staging: int, problem: str | None) -> None:
        """Write a fetched frame without defects, and free its slots."""
        entry = self._expected.get(command.handle)
        if entry is not None and not entry.is_over and problem is None:
            try:
                self._write(entry.lease, command, staging)
            except TransferFailed as error:
                problem = str(error)
        self._free.append(staging)
        self._end(command, problem or "", staged=True)
        if entry is not None:
            self._release(entry)

    def _write(self, lease: PageLease, command: m.Ingest, staging: int) -> None:
        with lease.pages(command.piece) as pages:
            if pages is not None:
                self._device.scatter(FrameCopy(staging, command.piece, pages, command.codec))
                lease.record(command.piece, self._kv)

    def _end(
        self, command: m.Ingest, problem: str, *, staged: bool = False, by_carrier: bool = False
    ) -> None:
        """Report a problem, the first of each sequence, and answer for the frame's slot, unless it
        was answered for when the frame was ``staged``."""
        entry = self._expected.get(command.handle)
        if problem and entry is not None and not entry.is_over:
            entry.failed = True
            self._send(m.ReceiveFailed(command.handle, problem, by_carrier))
            self._give(RejectedSequence(command.handle))
        if not command.arena:
            self._send(m.SlotsFree([command.slot]))
        elif not staged:
            self._send(m.SlotRead(command.handle, command.sequence))
