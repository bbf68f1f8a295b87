"""One transfer on its way into the pages of one sequence: credits out, frames in, and deadlines.

slot granted --credit--> frame sent --carrier--> InboundFrames --Ingest--> pages written
                                (in place: InboundFrames --Ingest--> read there, SlotRead)
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from engine.ipc import messages as m
from engine.kv_cache.kv_format import Codec
from kvtransfer.carrier import Carrier, InboundLink, InPlaceLink
from kvtransfer.codec_choice import measures_link
from kvtransfer.credits import CreditWindow
from kvtransfer.frames import ExpectedFrames, FrameHeader
from kvtransfer.inbound_frames import InboundFrames
from kvtransfer.receiver_context import ReceiverContext
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import CarrierFailed, NoPages, TransferFailed

OWN_S = 20.0
"""How long due frames may wait for this worker alone: for a free slot, or for its engine."""

MIN_WAITED_BYTES = 1 << 20
"""A wait for less KV measures the latency of messages instead of the link."""

_CHECK_S = 0.25


class InboundTransfer:
    """The frames of one transfer into the sequence ``handle``. ``PrefillRunCall`` creates it, and
    its owner runs it once. Event loop only."""

    def __init__(
        self,
        context: ReceiverContext,
        instance: str,
        handle: int,
        carrier: Carrier,
        link: InboundLink,
        expected: ExpectedFrames,
        grant_credits: Callable[[int], None],
        over: asyncio.Future[None],
    ) -> None:
        """``over`` fails when the call or the link does."""
        self._context = context
        self._session = context.session
        self._instance = instance
        self._handle = handle
        self._carrier = carrier
        self._link = link
        self._expected = expected
        self._grant_credits = grant_credits
        self._over = over
        self._received = InboundFrames(
            expected, context.session.arena.slot, self._on_frame, self._on_frame_in_place
        )
        self._window = CreditWindow(expected.total)
        self._unread: dict[int, FrameHeader] = {}  # frames that the engine reads in place
        self._all_here: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running = False
        self._ended = False
        self._refused: TransferFailed | None = None  # by the engine
        self._counted = False  # as complete or as failed
        self.bytes = 0
        self.frames = 0  # given to the engine
        self.codec: Codec = expected.codec

    @property
    def link_bytes_s(self) -> float | None:
        """Rate of the link, measured or declared; None if it is unknown."""
        return self._context.links.known_bytes_s(self._instance, self._carrier.name)

    def frames_due(self, tokens: int | None = None) -> None:
        """Count the sender's silence from now on. Due are the frames of the first ``tokens``
        tokens of the context, which have been computed; None: all frames."""
        due = self._expected.total
        if tokens is not None:
            blocks = tokens // BLOCK_TOKENS
            due = sum(piece.block + piece.blocks <= blocks for piece in self._expected.pieces)
        self._window.set_due(due)
        if self._running and self._carrier.needs_slots:
            self._context.slots.serve()

    @contextlib.contextmanager
    def waiting_alone(self) -> Iterator[None]:
        """Measure the body, in which the request waits for the rest of its KV alone."""
        links, name, before = self._context.links, self._carrier.name, self.bytes
        ready = self._session.ready
        assert ready is not None

        def measured(bytes_s: float) -> None:
            enough = self.bytes - before >= MIN_WAITED_BYTES
            if enough and measures_link(ready.kv, self.codec, ready.copy_costs, bytes_s):
                links.measured(self._instance, name, bytes_s)

        with self._context.traffic.kv_wait.waiting(lambda: self.bytes, measured):
            yield

    async def run(self, frame_s: float) -> None:
        """Receive every frame and give it to the engine, which must have pages for all of them.

        Raises CarrierFailed when no frame comes for ``frame_s`` seconds although one is due,
        NoPages when no slot is free here, and TransferFailed for what the call or the link says. It
        returns only when nothing writes to a slot of this transfer any more."""
        began = time.monotonic()
        try:
            self._start()
            await self._until_complete(frame_s)
            self._counted = True
            traffic = self._context.traffic
            traffic.count_transfer(self._carrier.name, self.codec, time.monotonic() - began)
            self._context.links.succeeded(self._instance, self._carrier.name)
            if (carried := self._received.carried_bytes_s) is not None:
                self._context.links.carried(self._instance, self._carrier.name, carried)
        except TransferFailed:
            self.count_failure()
            raise
        finally:
            self._context.slots.remove(self._window)
            self._ended = True
            closing = asyncio.create_task(self._close())
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError:
                await asyncio.wait([closing])  # the slots are in use until then
                raise

    async def _close(self) -> None:
        await self._link.close()
        self._context.slots.release(self._received.unused_slots())

    def count_failure(self) -> None:
        """Count one failed transfer, unless it never ran, or is counted already. A caller that
        cancels ``run`` because the sender is gone calls this, too."""
        if self._running and not self._counted:
            self._counted = True
            self._context.traffic.count_failure(self._carrier.name, self.codec)

    def on_receive_failed(self, event: m.ReceiveFailed) -> None:
        """The engine has refused a frame: ``run`` fails. A carrier that is at fault is avoided from
        now on."""
        self.count_failure()
        self._refused = TransferFailed(event.why)
        if not self._all_here.done():
            self._all_here.set_result(None)  # the wait for them is over
        if event.by_carrier:
            self._context.links.failed(self._instance, self._carrier.name, event.why)
            link: object = self._link
            if isinstance(link, InPlaceLink):
                link.on_unreadable(event.why)

    def on_slot_read(self, sequence: int) -> None:
        """The engine has read a frame in place, or has no need of it any more."""
        header = self._unread.pop(sequence, None)
        if header is not None:
            self._window.progress()
            self._count(header)
            self._link.on_slot_read(sequence)

    # ---- progress ---------------------------------------------------------------------------

    def _start(self) -> None:
        self._running = True
        self._window.begin()
        self._link.receive(self._received)
        if self._carrier.needs_slots:
            self._context.slots.add(self._window, self._on_slot)
        else:
            self._window.grant(self._expected.total)
            self._grant_credits(self._expected.total)

    async def _until_complete(self, frame_s: float) -> None:
        while not self._complete or self._refused is not None:
            if self._refused is not None:
                raise self._refused
            if self._over.done():
                self._over.result()  # raises
            self._check_deadlines(frame_s)
            both = (self._all_here, self._over)
            await asyncio.wait(both, timeout=_CHECK_S, return_when=asyncio.FIRST_COMPLETED)

    @property
    def _complete(self) -> bool:
        # Not ``InboundFrames.complete``, which a thread sets before the event loop has the frame.
        return self._window.arrived == self._expected.total and not self._unread

    def _check_deadlines(self, frame_s: float) -> None:
        window = self._window
        # While frames wait for the engine here, the sender may have no free slot.
        if not self._unread and window.stalled_s() > frame_s:
            raise CarrierFailed(f"{self._carrier.name}: no KV frame for {frame_s:g} s")
        if window.starved_s() > OWN_S:
            raise NoPages(f"no slot for KV was free here within {OWN_S:g} s")
        if self._unread and window.idle_s() > OWN_S:
            raise NoPages(f"the engine here has read no KV for {OWN_S:g} s")

    def _on_slot(self, slot: int) -> None:
        self._received.add_slot(slot)
        self._grant_credits(1)

    def _on_frame(self, header: FrameHeader, slot: int) -> None:
        if self._ended:
            self._context.slots.release([slot])
            return
        self._ingest(header, slot)
        self._window.arrive()
        self._count(header)
        self._context.slots.serve()

    def _on_frame_in_place(
        self, header: FrameHeader, arena: int, slot: int, generation: int
    ) -> None:
        self._unread[header.sequence] = header
        self._window.arrive()
        self._ingest(header, slot, arena, generation)

    def _ingest(self, header: FrameHeader, slot: int, arena: int = 0, generation: int = 0) -> None:
        self.frames += 1
        self._session.send_slot(
            m.Ingest(
                *(self._handle, header.sequence, slot, header.piece, header.nbytes, self.codec),
                *(arena, generation, header.checksum),
            )
        )

    def _count(self, header: FrameHeader) -> None:
        self.bytes += header.nbytes
        if (ready := self._session.ready) is not None:
            self._context.traffic.count_frame(
                self._carrier.name, ready.kv, self.codec, header.piece, header.nbytes
            )
        if self._complete and not self._all_here.done():
            self._all_here.set_result(None)
