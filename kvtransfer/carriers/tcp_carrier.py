"""The carrier ``tcp``: frames on sockets of their own, straight from slot to slot.

    P: TcpSender: sendmsg([header, slot]) --> kernel --> D: TcpLink: recv_into(slot)

The sender names its port alone; the receiver dials the host of the sender's control service. Both
files beside this one say how each end works, and tcp_connection.py what is on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.process.session import EngineSession
from kvtransfer.carrier import InboundLink, InboundRequest
from kvtransfer.carriers.tcp_connection import TcpSecurity
from kvtransfer.carriers.tcp_pool import ConnectionPool
from kvtransfer.carriers.tcp_receiving import TcpLink, sender_endpoint
from kvtransfer.carriers.tcp_sending import TcpSender
from kvtransfer.inbound_frames import InboundFrames
from kvtransfer.outbound import OutboundFrames
from protocol.errors import CarrierFailed
from protocol.security.listen_hosts import check_worker_host
from protocol.wire import wire_pb2 as pb


class TcpCarrier:
    """Both ends of the carrier ``tcp`` of one worker."""

    name = "tcp"
    needs_slots = True

    def __init__(self, token: str, security: TcpSecurity, port: int = 0) -> None:
        """``port`` 0: any free one."""
        self._security = security
        self._pool = ConnectionPool(token.encode(), security)
        self._sender = TcpSender(token.encode(), security)
        self.port = port

    async def start(self, host: str) -> None:
        check_worker_host(host, tls=self._security.encrypts)
        self.port = self._sender.start(host, self.port)

    async def close(self) -> None:
        self._sender.close()
        await self._pool.close()

    def offer(self, endpoint: str) -> str | None:
        return ""

    def connect(self, request: InboundRequest) -> InboundLink:
        try:
            endpoint = sender_endpoint(request)
            self._pool.check(endpoint)
        except CarrierFailed as error:
            request.failed(error)
            return NoLink()
        return TcpLink(self._pool, request, endpoint)

    def accept(self, offer: pb.CarrierOffer, session: EngineSession) -> str | None:
        return str(self.port)

    def open(
        self,
        transfer: bytes,
        offer: pb.CarrierOffer,
        session: EngineSession,
        say: Callable[[pb.PrefillEvent], None],
    ) -> OutboundFrames:
        sender = self._sender
        return sender.transfers.open(transfer, sender.on_frame, sender.on_close)


class NoLink:
    """The link of a transfer that has failed before it could connect."""

    def receive(self, frames: InboundFrames) -> None:
        """Nothing comes."""

    def on_filled(self, slots: Sequence[pb.FilledSlot]) -> None:
        """The transfer has failed already."""

    def on_slot_read(self, sequence: int) -> None:
        """No frame came."""

    async def close(self) -> None:
        """Nothing is open."""
