"""One KV transfer as its receiver sees it: requests slots, grants credits, feeds the engine.

slot granted --credit--> frame sent --KVPull's thread--> slot filled --Ingest--> scattered
"""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.ipc import messages as m
from engine.kv_cache.kv_format import KVPiece
from kvtransfer.frames import ExpectedFrames
from kvtransfer.receiver import CreditWindow, KVPull
from kvtransfer.receiver_context import ReceiverContext
from protocol.errors import TransferFailed


class InboundTransfer:
    """The frames of one transfer on their way into the pages of one sequence. ``PrefillRunCall``
    creates it; it belongs to the event loop."""

    def __init__(
        self,
        context: ReceiverContext,
        handle: int,
        expected: ExpectedFrames,
        grant_credit: Callable[[], None],
    ) -> None:
        self._context = context
        self._session = context.session
        self._handle = handle
        self._expected = expected
        self._grant_credit = grant_credit
        self._pull: KVPull | None = None
        self._counted = False  # as complete or as failed
        self.window = CreditWindow(expected.total)
        self.bytes = 0  # of KV that has come

    async def run(self, endpoint: str) -> None:
        """Receive every frame and give it to the engine, which must have pages for all of them.

        Raises TransferFailed."""
        view = self._session.arena.slot
        codec, began = self._expected.codec, time.monotonic()
        self._pull = self._context.client.open(endpoint, self._expected, view, self._on_frame)
        try:
            self._request_slots()
            await self._context.client.read_to_end(self._pull)
            self._counted = True
            self._context.traffic.count_transfer(codec, time.monotonic() - began)
        except TransferFailed:
            self.count_failure()
            raise
        finally:
            self._context.slots.cancel_requests(self)
            self._context.slots.release(self._pull.unused_slots())

    def count_failure(self) -> None:
        """Count one failed transfer, unless it is complete or counted already. A caller that
        cancels ``run`` because the sender is gone calls this, too."""
        if self._pull is not None and not self._counted:
            self._counted = True
            self._context.traffic.count_failure(self._expected.codec)

    def _request_slots(self) -> None:
        for _ in range(self.window.request_slots()):
            self._context.slots.request(self, self._on_slot)

    def _on_slot(self, slot: int) -> None:
        assert self._pull is not None
        self.window.granted()
        self._pull.add_slot(slot)
        self._grant_credit()

    def _on_frame(self, slot: int, piece: KVPiece, nbytes: int) -> None:
        self.window.arrived()
        self.bytes += nbytes
        codec = self._expected.codec
        if (ready := self._session.ready) is not None:
            self._context.traffic.count_frame(ready.kv, codec, piece, nbytes)
        self._session.send(m.Ingest(self._handle, slot, piece, nbytes, codec))
        self._request_slots()
