"""The KV side of one hand-over: wait for pages, grant credits, pass frames to the engine.

slot granted --credit--> P sends a frame --thread--> slot filled --Ingest--> scattered --> slot
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from engine.ipc import messages as m
from engine.kv_cache.kv_format import Piece
from engine.process.session import Session
from kvtransfer.codec_choice import TrafficCounter
from kvtransfer.frames import Expectation
from kvtransfer.receiver import InboundSlots, KVSink, Pull
from protocol.errors import TransferFailed

# MERGED kvtransfer.window
# How many frames a transfer may have under way, and whether its sender has gone quiet.
#
#     asked for a slot --granted--> credit with the sender --frame--> arrived
#
# A transfer starts with few credits: until its first frame comes, its prompt may still be waiting
# to
# be computed, and slots that it held would be missing elsewhere.

START = 2
"""Frames under way before the first one has come."""

OPEN = 4
"""Frames under way once frames flow."""


class Window:
    """Counts of one transfer of ``total`` frames."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._asked = 0
        self._granted = 0
        self._arrived = 0
        self._moved = clock()

    def to_ask(self) -> int:
        """Slots to ask for now; they count as asked for."""
        size = OPEN if self._arrived else START
        count = min(self._total - self._asked, size - (self._asked - self._arrived))
        self._asked += count
        return count

    def granted(self) -> None:
        """The sender may send one frame more."""
        if self._granted == self._arrived:
            self._moved = self._clock()
        self._granted += 1

    def arrived(self) -> None:
        self._arrived += 1
        self._moved = self._clock()

    def stalled_s(self) -> float:
        """Seconds for which the sender has held a credit and sent nothing."""
        return 0.0 if self._granted == self._arrived else self._clock() - self._moved


PAGES_S = 20.0
"""How long a hand-over waits for pages here, while the prefill worker holds its own."""


class Incoming:
    """Frames of one transfer into the reserved pages of one sequence. Event loop only."""

    def __init__(
        self,
        session: Session,
        slots: InboundSlots,
        sink: KVSink,
        handle: int,
        expectation: Expectation,
        credit: Callable[[], None],
        traffic: TrafficCounter,
    ) -> None:
        self._session = session
        self._slots = slots
        self._sink = sink
        self._handle = handle
        self._expectation = expectation
        self._credit = credit
        self._traffic = traffic
        self._pull: Pull | None = None
        self._counted = False
        self.window = Window(expectation.total)
        self.bytes = 0  # of KV that has come
        self._reserved: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_reserved(self) -> None:
        """The engine has pages for the missing blocks."""
        if not self._reserved.done():
            self._reserved.set_result(None)

    async def reserve(self) -> None:
        """Wait for pages. Raises TransferFailed."""
        self._session.send(m.Reserve(self._handle))
        try:
            async with asyncio.timeout(PAGES_S):
                await self._reserved
        except TimeoutError as error:
            raise TransferFailed(f"no pages free here within {PAGES_S:g} s") from error

    async def run(self, endpoint: str) -> None:
        """Until every frame has been given to the engine, which has pages for all of them. Raises
        TransferFailed."""
        view = self._session.arena.slot
        codec, began = self._expectation.codec, time.monotonic()
        self._pull = self._sink.open(endpoint, self._expectation, view, self._on_frame)
        try:
            self._ask()
            await self._sink.finish(self._pull)
            self._counted = True
            self._traffic.ended(codec, time.monotonic() - began)
        except TransferFailed:
            self.broke()
            raise
        finally:
            self._slots.withdraw(self)
            self._slots.give_back(self._pull.unused_slots())

    def broke(self) -> None:
        """Count a failure, once, if frames were still to come. Whoever cancels ``run`` because the
        other end is gone calls this, too."""
        if self._pull is not None and not self._counted:
            self._counted = True
            self._traffic.failed(self._expectation.codec)

    def _ask(self) -> None:
        for _ in range(self.window.to_ask()):
            self._slots.ask(self, self._on_slot)

    def _on_slot(self, slot: int) -> None:
        assert self._pull is not None
        self.window.granted()
        self._pull.add_slot(slot)
        self._credit()

    def _on_frame(self, slot: int, piece: Piece, nbytes: int) -> None:
        self.window.arrived()
        self.bytes += nbytes
        codec = self._expectation.codec
        if (ready := self._session.ready) is not None:
            self._traffic.count(ready.kv, codec, piece, nbytes)
        self._session.send(m.Ingest(self._handle, slot, piece, nbytes, codec))
        self._ask()
