"""The receiving end of the carrier ``tcp``: connections to senders, and threads that read frames
straight into slots.

    connecting --OKAY--> connected --receive--> watched --bytes--> reading (a thread) --end--> kept
                                                   ^                  |
                                                   +--- no more yet --+

A connection holds a thread only while it connects, and while frames come. Connections whose
transfer has ended well are kept for the next transfer from the same worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import xxhash

from kvtransfer.carrier import CONNECT_S, InboundRequest
from kvtransfer.carriers.tcp_connection import END, TcpConnection
from kvtransfer.carriers.tcp_pool import ConnectionPool
from kvtransfer.frames import HEADER_BYTES
from kvtransfer.inbound_frames import InboundFrames
from protocol.endpoints.grpc_endpoints import host_of, join_host_port
from protocol.errors import CarrierFailed, TransferFailed
from protocol.wire import wire_pb2 as pb

_READ_S = 5.0
"""Within this time the next portion of a frame must come."""

_LINGER_S = 0.02
"""How long a thread waits for the next frame before it lets go of a connection."""

_END_S = 1.0
"""How long a connection may take to bring the end after the last frame, to be kept."""

_CLOSE_S = 2.0

_PORTION = 1 << 20
"""Bytes that are received at once, and then added to the checksum while they are in the cache."""


@dataclass(eq=False)
class _Lane:
    """One connection of a transfer."""

    number: int
    connection: TcpConnection | None = None  # None: it connects, or has ended
    work: asyncio.Future[object] | None = field(default=None)  # on a thread


class TcpLink:
    """The ``InboundLink`` of one transfer, with one or more connections."""

    def __init__(self, pool: ConnectionPool, request: InboundRequest, endpoint: str) -> None:
        self._pool = pool
        self._request = request
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._frames: InboundFrames | None = None
        self._closed = False
        self._lanes = [_Lane(number) for number in range(request.connections)]
        self._connected = False
        pool.links.add(self)
        for lane in self._lanes:
            self._connect(lane)
        # Beside the deadlines of a thread, because names are resolved without one.
        self._deadline = self._loop.call_later(2 * CONNECT_S, self._check_connected)

    # ---- connecting -------------------------------------------------------------------------

    def _connect(self, lane: _Lane) -> None:
        kept = self._pool.take(self._endpoint)
        arguments = self._endpoint, self._request.transfer, lane.number, kept
        lane.work = self._loop.run_in_executor(
            self._pool.connecting, self._pool.connect, *arguments
        )
        lane.work.add_done_callback(partial(self._on_connected, lane))

    def _on_connected(self, lane: _Lane, work: asyncio.Future[object]) -> None:
        lane.work = None
        if work.cancelled():
            return self._forget(lane)
        if (error := work.exception()) is not None:
            self._forget(lane)
            if not self._closed and (not self._lanes or not self._connected):
                self._fail(CarrierFailed(f"tcp: {self._endpoint}: {error or 'no connection'}"))
            return None
        connection = work.result()
        assert isinstance(connection, TcpConnection)
        lane.connection, self._connected = connection, True
        if self._closed and not self._may_end(lane):
            return self._drop(lane)
        if self._frames is not None:
            self._watch(lane)
        return None

    def _check_connected(self) -> None:
        if not self._connected and not self._closed:
            self._fail(
                CarrierFailed(f"tcp: {self._endpoint}: no connection within {CONNECT_S:g} s")
            )

    # ---- frames -----------------------------------------------------------------------------

    def receive(self, frames: InboundFrames) -> None:
        self._frames = frames
        for lane in list(self._lanes):
            if lane.connection is not None:
                self._watch(lane)

    def on_filled(self, slots: Sequence[pb.FilledSlot]) -> None:
        raise TransferFailed("slots were filled of a transfer whose frames travel on a stream")

    def on_slot_read(self, sequence: int) -> None:
        raise AssertionError("no frame of a stream is read in place")

    def _watch(self, lane: _Lane) -> None:
        """Read frames on a thread as soon as bytes come."""
        assert lane.connection is not None
        self._loop.add_reader(lane.connection.fileno(), self._read, lane)

    def _read(self, lane: _Lane) -> None:
        assert lane.connection is not None and self._frames is not None
        self._loop.remove_reader(lane.connection.fileno())
        lane.work = self._loop.run_in_executor(
            self._pool.reading, read_frames, lane.connection, self._frames, len(self._lanes)
        )
        lane.work.add_done_callback(partial(self._on_read, lane))

    def _on_read(self, lane: _Lane, work: asyncio.Future[object]) -> None:
        lane.work = None
        error = None if work.cancelled() else work.exception()
        if error is not None or work.cancelled():
            self._drop(lane)
            if isinstance(error, TransferFailed):
                self._fail(error)
            elif error is not None:
                self._fail(CarrierFailed(f"tcp: the connection broke: {error}"))
        elif work.result():  # the end came
            assert lane.connection is not None
            self._pool.keep(self._endpoint, lane.connection)
            self._forget(lane)
            if not self._lanes and self._frames is not None and not self._frames.complete:
                self._fail(CarrierFailed("tcp: the connections ended before the last frame"))
        elif self._closed and not self._may_end(lane):
            self._drop(lane)
        else:
            self._watch(lane)

    def _fail(self, error: TransferFailed) -> None:
        if not self._closed:
            self._request.failed(error)

    # ---- the end ----------------------------------------------------------------------------

    def _may_end(self, lane: _Lane) -> bool:
        """Return whether only the end is due on this connection, which will be kept then."""
        return self._frames is not None and self._frames.complete

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._deadline.cancel()
        if self._frames is not None and self._frames.complete and self._lanes:
            self._loop.call_later(_END_S, self._abort_lanes)  # their ends are under way
        else:
            await self.abort()

    async def abort(self) -> None:
        """Close every connection, and wait until no thread uses one."""
        self._closed = True
        self._deadline.cancel()
        working = self._abort_lanes()
        if working:
            await asyncio.wait(working, timeout=_CLOSE_S)

    def _abort_lanes(self) -> list[asyncio.Future[object]]:
        working = []
        for lane in list(self._lanes):
            if lane.connection is not None and lane.work is not None:
                lane.connection.abort()
                working.append(lane.work)
            elif lane.connection is not None:
                self._drop(lane)
        return working

    def _drop(self, lane: _Lane) -> None:
        assert lane.connection is not None
        self._loop.remove_reader(lane.connection.fileno())
        lane.connection.close()
        self._forget(lane)

    def _forget(self, lane: _Lane) -> None:
        lane.connection = None
        if lane in self._lanes:
            self._lanes.remove(lane)
        if not self._lanes:
            self._pool.links.discard(self)


def sender_endpoint(request: InboundRequest) -> str:
    """Return host:port of the sender's KV port: its host is that of its control service.

    Raises CarrierFailed for a port that is none."""
    # The length first: int() refuses thousands of digits with an error of its own.
    address = request.address
    port = int(address) if len(address) <= 5 and address.isdecimal() else 0
    if not 0 < port < 65536:
        raise CarrierFailed(f"the other worker gave the invalid KV address {address[:40]!r}")
    return join_host_port(host_of(request.endpoint), port)


def read_frames(connection: TcpConnection, frames: InboundFrames, connections: int) -> bool:
    """Read frames into their slots until none comes any more; return whether the end came. The
    transfer has so many ``connections``, which share the link. A thread runs it. Raises
    TransferFailed or ConnectionBroken."""
    header = bytearray(HEADER_BYTES)
    view = memoryview(header)
    while connection.readable(_LINGER_S):
        got = connection.receive_some(view[:1], _LINGER_S)
        if not got:
            return False  # of TLS itself, no byte of a frame
        connection.receive(view[1:], _READ_S)
        if header == END:
            return True
        frame = frames.admit(view)
        began = time.monotonic()
        checksum = _receive_payload(connection, frame.payload)
        frames.filled(frame, checksum, (time.monotonic() - began) / connections)
    return False


def _receive_payload(connection: TcpConnection, payload: memoryview) -> int:
    """Receive the payload into its slot, and return its checksum."""
    digest = xxhash.xxh3_64()
    for start in range(0, len(payload), _PORTION):
        portion = payload[start : start + _PORTION]
        connection.receive(portion, _READ_S)
        digest.update(portion)
    return int(digest.intdigest())
