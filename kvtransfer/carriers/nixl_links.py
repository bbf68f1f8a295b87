"""D's end of one transfer with the carrier ``nixl``.

    P: put --Filled--> D: on_filled, admit --Read--> mover --ReadDone--> Taken, filled
    P: taken <-----------------------------------------------------------+

D reads P's slot with no lock on it. A slot that P has filled again in the meantime cannot pass:
the frame's header came on the control stream, it holds the checksum of the payload that the slot
had then, and ``filled`` compares.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from kvtransfer.carrier import CONNECT_S, InboundRequest
from kvtransfer.inbound_frames import AdmittedFrame, InboundFrames
from kvtransfer.nixl.messages import MoverAddress
from kvtransfer.nixl.mover_keeper import MoverKeeper
from kvtransfer.nixl.mover_process import MoverProcess
from protocol.errors import CarrierFailed, TransferFailed
from protocol.wire import wire_pb2 as pb

CLOSE_S = 0.5
"""How long reads under way may take to end when their transfer is over. Then the mover is killed,
which is the only way to end them."""


class _Connection(NamedTuple):
    mover: MoverProcess
    address: MoverAddress
    peer: int


class NixlInboundLink:
    """D's end of one transfer. ``NixlCarrier.connect`` creates it. Event loop only."""

    def __init__(self, request: InboundRequest, movers: MoverKeeper, checks: Executor) -> None:
        """``checks`` runs what compares payloads with their checksums."""
        self._request = request
        self._movers = movers
        self._checks = checks
        self._frames: InboundFrames | None = None
        self._carrying: set[asyncio.Task[None]] = set()
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        self._connecting = asyncio.create_task(self._connect(), name="nixl-connect")
        self._connecting.add_done_callback(self._on_connected)

    async def _connect(self) -> _Connection:
        """Raises CarrierFailed, or TransferFailed if the mover is lost meanwhile."""
        address = MoverAddress.decode(self._request.address)
        mover = await self._movers.wait_ready(self._request.session)
        try:
            async with asyncio.timeout(CONNECT_S):
                return _Connection(mover, address, await mover.peers.acquire(address))
        except TimeoutError:
            raise CarrierFailed(
                f"nixl: no answer from the other worker for {CONNECT_S:g} s"
            ) from None

    def _on_connected(self, connecting: asyncio.Task[_Connection]) -> None:
        if not connecting.cancelled() and (error := connecting.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._closed:
            if not isinstance(error, TransferFailed):
                error = CarrierFailed(f"nixl: {error!r}")
            self._request.failed(error)

    def receive(self, frames: InboundFrames) -> None:
        self._frames = frames

    def on_filled(self, slots: Sequence[pb.FilledSlot]) -> None:
        if self._frames is None:
            raise TransferFailed("slots were filled before a credit was granted")
        for filled in slots:
            frame = self._frames.admit(filled.header)
            task = asyncio.create_task(self._carry(self._frames, frame, filled.slot))
            self._carrying.add(task)
            task.add_done_callback(self._carrying.discard)

    async def _carry(self, frames: InboundFrames, frame: AdmittedFrame, slot: int) -> None:
        """Read one frame's payload out of P's ``slot``, and give it to the engine."""
        loop = asyncio.get_running_loop()
        try:
            mover, address, peer = await asyncio.shield(self._connecting)
            remote = address.locate(slot, frame.header.nbytes)
            await mover.read(peer, remote, frame.slot, frame.header.nbytes)
            self._say_taken(frame.header.sequence)
            await loop.run_in_executor(self._checks, frames.filled, frame)
        except Exception as error:
            self._fail(error)

    def _say_taken(self, sequence: int) -> None:
        if not self._closed:
            self._request.say(pb.PrefillCall(taken=pb.PrefillCall.Taken(sequences=[sequence])))

    def on_slot_read(self, sequence: int) -> None:
        raise AssertionError("no frame of nixl is read in place")

    async def close(self) -> None:
        if self._closing is None:
            self._closed = True
            self._closing = asyncio.create_task(self._end(), name="nixl-close")
        await asyncio.shield(self._closing)

    async def _end(self) -> None:
        self._connecting.cancel()
        await asyncio.wait([self._connecting])
        if self._carrying:
            await asyncio.wait(self._carrying, timeout=CLOSE_S)
        if self._connecting.cancelled() or self._connecting.exception() is not None:
            return
        mover, address, peer = self._connecting.result()
        if self._carrying:
            mover.end("a transfer was over, and a read for it was not", peer)
        if not mover.alive:
            await mover.gone()
        mover.peers.release(address)
