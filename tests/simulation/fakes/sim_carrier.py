"""A carrier of KV frames over the simulated network, with both of its real ends' obligations.

    P: OutboundFrames (real) --pump--> connection --> InboundFrames (real) of D

Two of them serve a worker, "tcp" and "grpc", as two connections that can fail on their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from engine.process.session import EngineSession
from kvtransfer.carrier import CONNECT_S, InboundRequest
from kvtransfer.frames import HEADER_BYTES
from kvtransfer.inbound_frames import InboundFrames
from kvtransfer.outbound import OutboundFrames, TransferTable
from protocol.errors import CarrierFailed, TransferFailed
from protocol.wire import wire_pb2 as pb
from tests.simulation.fakes.network import Connection
from tests.simulation.fakes.rpc import Endpoints
from tests.simulation.fakes.virtual_loop import SimProcess


class SimCarrier:
    """Both ends of one carrier of the worker front ``process``."""

    needs_slots = True

    def __init__(self, name: str, endpoints: Endpoints, process: SimProcess) -> None:
        self.name = name
        self.endpoints = endpoints
        self.process = process
        self.broken = False  # by a fault: it accepts no connection
        self.table = TransferTable()
        self._pumps: dict[bytes, _Pump] = {}

    async def start(self, host: str) -> None:
        pass

    async def close(self) -> None:
        pass

    # ---- D's end ----------------------------------------------------------------------------

    def offer(self, endpoint: str) -> str | None:
        return ""

    def connect(self, request: InboundRequest) -> _InboundLink:
        return _InboundLink(self, request)

    # ---- P's end ----------------------------------------------------------------------------

    def accept(self, offer: pb.CarrierOffer, session: EngineSession) -> str | None:
        return self.name

    def open(
        self,
        transfer: bytes,
        offer: pb.CarrierOffer,
        session: EngineSession,
        say: Callable[[pb.PrefillEvent], None],
    ) -> OutboundFrames:
        return self.table.open(transfer, self._on_frame, self._on_close)

    def _on_frame(self, outbound: OutboundFrames) -> None:
        if (pump := self._pumps.get(outbound.transfer)) is not None:
            pump.wake.set()

    def _on_close(self, outbound: OutboundFrames) -> None:
        if (pump := self._pumps.pop(outbound.transfer, None)) is not None:
            pump.end()

    def serve(self, connection: Connection, transfer: bytes, link: _InboundLink) -> None:
        """D has connected. Runs in P."""
        outbound = None if self.broken else self.table.claim(transfer)
        if outbound is None:
            connection.down.send(16, lambda _: link.on_lost("refused"), None)
            connection.close(self.process)
            return
        connection.down.send(16, lambda _: link.on_ready(), None)
        self._pumps[transfer] = _Pump(outbound, connection, link, self.process)

    def fail(self) -> None:
        """Break every connection of this end, as a fault."""
        for pump in list(self._pumps.values()):
            pump.connection.lose(self.process)


class _Pump:
    """Sends the frames of one transfer, as a thread of a carrier does."""

    def __init__(
        self,
        outbound: OutboundFrames,
        connection: Connection,
        link: _InboundLink,
        process: SimProcess,
    ) -> None:
        self.connection = connection
        self.wake = asyncio.Event()
        self._outbound = outbound
        self._link = link
        self._process = process
        self._task = process.spawn(self._run(), "pump")
        connection.on_lost[process] = lambda why: self.end()

    def end(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        outbound, down = self._outbound, self.connection.down
        try:
            while not outbound.ended:
                if (frame := outbound.take(0.0)) is None:
                    self.wake.clear()
                    await self.wake.wait()
                    continue
                try:
                    data = frame.header + bytes(frame.payload)
                    down.send(len(data), self._link.on_frame, data)
                    await down.wait_for_room()
                finally:
                    frame.release()
        finally:
            self.connection.close(self._process)


class _InboundLink:
    """D's end of one transfer."""

    def __init__(self, carrier: SimCarrier, request: InboundRequest) -> None:
        self._request = request
        self._process = carrier.process
        self._frames: InboundFrames | None = None
        self._closed = self._ready = False
        self._connection: Connection | None = None
        loop = asyncio.get_running_loop()
        found = carrier.endpoints.find(request.endpoint)
        if found is None:
            loop.call_later(0.001, self.on_lost, "connection refused")
            return
        process, methods = found
        there: SimCarrier = methods[f"kv:{carrier.name}"]
        connection = carrier.endpoints.network.connect(self._process, process)
        self._connection = connection
        connection.on_lost[self._process] = self.on_lost
        connection.up.send(32, lambda _: there.serve(connection, request.transfer, self), None)
        loop.call_later(CONNECT_S, self._check_ready)

    def _check_ready(self) -> None:
        if not self._ready:
            self.on_lost("not connected in time")

    def on_ready(self) -> None:
        self._ready = True

    def on_lost(self, why: str) -> None:
        done = self._frames is not None and self._frames.complete
        if not self._closed and not done:
            self._request.failed(CarrierFailed(f"simulated: {why}"))

    def on_frame(self, data: Any) -> None:
        if self._closed:
            return
        assert self._frames is not None
        view = memoryview(data)
        try:
            frame = self._frames.admit(view[:HEADER_BYTES])
            frame.payload[:] = view[HEADER_BYTES:]
            self._frames.filled(frame)
        except TransferFailed as error:
            self._request.failed(error)

    # ---- InboundLink ------------------------------------------------------------------------

    def receive(self, frames: InboundFrames) -> None:
        self._frames = frames

    def on_filled(self, slots: Sequence[pb.FilledSlot]) -> None:
        raise TransferFailed("slots were filled of a transfer whose frames travel on a stream")

    def on_slot_read(self, sequence: int) -> None:
        raise AssertionError("no frame of a stream is read in place")

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._connection is not None:
                connection = self._connection
                # A reset, so that the other end stops to send.
                connection.lose(self._process)
