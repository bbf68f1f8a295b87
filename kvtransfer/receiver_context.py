"""What the KV transfers into one worker share. ``Worker`` creates the one ``KVReceiver``; the
Decode and the Prefill service ask it for the context of the engine session that serves now.

``PrefillChannels`` has the gRPC channels on which Prefill.Run is called; carriers have connections
of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from engine.process.client import EngineClient
from engine.process.session import EngineSession
from kvtransfer.carrier import Carrier
from kvtransfer.codec_choice import CodecChoice, choose_frames
from kvtransfer.credits import InboundSlots
from kvtransfer.links import LinkTable
from kvtransfer.traffic import TrafficCounter
from protocol.endpoints.grpc_endpoints import LOOPBACK_ONLY, ChannelCache, EndpointSecurity
from protocol.security.cluster_token import token_metadata
from protocol.wire import wire_pb2 as pb
from protocol.wire import wire_pb2_grpc as rpc

CONNECTION_BYTES_S = 2.5e9
"""About what one TCP connection moves; faster links get several."""

MAX_CONNECTIONS = 8

SUSPECT_S = 5.0
"""How long a worker that was found dead or silent gets no new prefill; after that its record has
expired in Redis."""


PrefillStream: TypeAlias = "grpc.aio.StreamStreamCall[pb.PrefillCall, pb.PrefillEvent]"


class PrefillChannels:
    """Opens Prefill.Run calls, and remembers which workers were found dead. A worker has one."""

    def __init__(self, token: str, security: EndpointSecurity = LOOPBACK_ONLY) -> None:
        self._metadata = token_metadata(token)
        self._security = security
        self._channels = ChannelCache(security.async_channel, self._close_later)
        self._closing: set[asyncio.Task[None]] = set()
        self._suspected_until: dict[str, float] = {}  # by endpoint

    def suspect(self, endpoint: str) -> None:
        """Record that the worker there was found dead or silent."""
        now = time.monotonic()
        self._suspected_until = {e: t for e, t in self._suspected_until.items() if t > now}
        self._suspected_until[endpoint] = now + SUSPECT_S

    def is_suspected(self, endpoint: str) -> bool:
        """Return whether the worker there was found dead or silent in the last SUSPECT_S."""
        if time.monotonic() > self._suspected_until.get(endpoint, 0.0):
            self._suspected_until.pop(endpoint, None)
            return False
        return True

    def open_call(self, endpoint: str) -> PrefillStream:
        """Open a Prefill.Run call, which the caller must cancel.

        Raises TransferFailed for an endpoint that may not be dialled."""
        channel = self._channels.get(endpoint, self._security.version)
        stub: rpc.PrefillAsyncStub = rpc.PrefillStub(channel)
        return stub.Run(metadata=self._metadata)

    def _close_later(self, channel: grpc.aio.Channel) -> None:
        closing = asyncio.create_task(channel.close(), name="idle channel")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for channel in self._channels.drain():
            await channel.close()


@dataclass(frozen=True)
class ReceiverContext:
    """What all transfers into one engine session share."""

    session: EngineSession
    slots: InboundSlots
    carriers: Mapping[str, Carrier]  # best first
    links: LinkTable
    channels: PrefillChannels
    codec: CodecChoice
    traffic: TrafficCounter

    def carrier_offers(self, instance: str, endpoint: str) -> list[pb.CarrierOffer]:
        """Return the carriers to offer to the worker ``instance``, whose control service is at
        ``endpoint``, with the frames that suit each link."""
        offers = []
        for name in self.links.offers(instance):
            address = self.carriers[name].offer(endpoint)
            if address is not None:
                offers.append(self._offer(instance, name, address))
        return offers

    def _offer(self, instance: str, name: str, address: str) -> pb.CarrierOffer:
        ready = self.session.ready
        assert ready is not None
        frames = choose_frames(
            *(ready.kv, self.codec, ready.copy_costs),
            self.links.expected_bytes_s(instance, name),
            self.session.arena.shape.slot_bytes,
        )
        return pb.CarrierOffer(
            name=name, address=address, codec=frames.codec, frame_bytes=frames.frame_bytes
        )

    def connections(self, instance: str, carrier: str) -> int:
        """Return how many connections fill the link, as far as its rate is known."""
        rate = self.links.known_bytes_s(instance, carrier) or 0.0
        return max(1, min(MAX_CONNECTIONS, round(rate / CONNECTION_BYTES_S)))


class KVReceiver:
    """The receiving end of a worker, which outlives its engine processes. Event loop only."""

    def __init__(
        self,
        engine: EngineClient,
        carriers: Sequence[Carrier],
        channels: PrefillChannels,
        codec: CodecChoice,
        link_bytes_s: float = 0.0,
    ) -> None:
        """``carriers``: best first, the one that always works last. ``link_bytes_s``: declared
        bandwidth of the network; 0: unknown."""
        self._engine = engine
        self._carriers = {carrier.name: carrier for carrier in carriers}
        self._channels = channels
        self._codec = codec
        self.links = LinkTable(list(self._carriers), link_bytes_s)
        self.traffic = TrafficCounter()
        self._slots: tuple[EngineSession, InboundSlots] | None = None

    def context(self) -> ReceiverContext:
        """Return the context of the engine session that serves now; there must be one."""
        session = self._engine.current
        assert session is not None and session.ready is not None
        if self._slots is None or self._slots[0] is not session:
            self._slots = (session, InboundSlots(session))
        return ReceiverContext(
            *(session, self._slots[1], self._carriers, self.links),
            *(self._channels, self._codec, self.traffic),
        )

    async def close(self) -> None:
        await self._channels.close()
