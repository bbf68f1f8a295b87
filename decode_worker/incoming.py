"""The KV side of one hand-over: wait for pages, grant credits, pass frames to the engine.

slot granted --credit--> P sends a frame --thread--> slot filled --Ingest--> scattered --> slot
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from engine import messages as m
from engine.pieces import Piece
from engine.session import Session
from kvtransfer.frames import Expectation
from kvtransfer.sink import KVSink, Pull
from kvtransfer.slots import InboundSlots

WINDOW = 4
"""Frames in flight of one transfer."""


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
    ) -> None:
        self._session = session
        self._slots = slots
        self._sink = sink
        self._handle = handle
        self._expectation = expectation
        self._credit = credit
        self._pull: Pull | None = None
        self._asked = 0
        self._granted = 0
        self._arrived = 0
        self._moved = time.monotonic()
        self.reserved = asyncio.Event()  # set when the engine has pages for the missing blocks

    async def run(self, endpoint: str) -> None:
        """Until every frame has been given to the engine. Raises TransferFailed."""
        self._session.send(m.Reserve(self._handle))
        await self.reserved.wait()
        if self._expectation.total == 0:
            return
        view = self._session.arena.slot
        self._pull = self._sink.open(endpoint, self._expectation, view, self._on_frame)
        try:
            for _ in range(min(WINDOW, self._expectation.total)):
                self._ask()
            await self._sink.finish(self._pull)
        finally:
            self._slots.withdraw(self)
            self._slots.give_back(self._pull.unused_slots())

    def stalled_s(self) -> float:
        """Seconds for which the sender has held a credit and sent nothing."""
        if self._granted == self._arrived:
            return 0.0
        return time.monotonic() - self._moved

    def _ask(self) -> None:
        self._asked += 1
        self._slots.ask(self, self._on_slot)

    def _on_slot(self, slot: int) -> None:
        assert self._pull is not None
        if self._granted == self._arrived:
            self._moved = time.monotonic()
        self._granted += 1
        self._pull.add_slot(slot)
        self._credit()

    def _on_frame(self, slot: int, piece: Piece, nbytes: int) -> None:
        self._arrived += 1
        self._moved = time.monotonic()
        self._session.send(m.Ingest(self._handle, slot, piece, nbytes))
        if self._asked < self._expectation.total:
            self._ask()
