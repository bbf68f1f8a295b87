"""What the KV transfers into one worker share. ``Worker`` creates the one ``KVReceiver``; the
Decode and the Prefill service ask it for the context of the engine session that serves now.

``PrefillChannels`` has the gRPC channels on which Prefill.Run is called; those for KV/Pull belong
to ``KVClient`` (receiver.py).

``TrafficCounter`` counts the KV that this worker receives and measures how fast it comes while
requests wait; the metrics page and the utilisation of the worker read it, on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc

from engine.ipc.counters import BucketCounts
from engine.kv_cache.kv_format import Codec, KVFormat, KVPiece
from engine.process.client import EngineClient
from engine.process.session import EngineSession
from kvtransfer.codec_choice import CodecChoice, choose_codec
from kvtransfer.frames import HEADER_BYTES
from kvtransfer.receiver import InboundSlots, KVClient
from protocol.endpoints.grpc_endpoints import LOOPBACK_ONLY, ChannelCache, EndpointSecurity
from protocol.security.cluster_token import token_metadata
from protocol.wire import wire_pb2 as pb
from protocol.wire import wire_pb2_grpc as rpc

MIN_MEASURED_BYTES = 64 << 10
"""A wait that brings fewer bytes measures latency instead of bandwidth, and is left out."""

MEASURED_WAITS = 16
"""Number of recent waits that ``best_bytes_per_s`` covers, so that a link that has become slower is
noticed after so many."""

TRANSFER_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)


class KVWaitMeter:
    """Waits for KV alone, over all transfers to one worker.

    Once a prompt is computed, the rest of its KV (the tail) comes as fast as the link carries it.
    The best of the recent tails is the bandwidth of a link for which no setting declares one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rates: deque[float] = deque(maxlen=MEASURED_WAITS)
        self._active = 0
        self._waited_s = 0.0
        self._updated = clock()

    @contextmanager
    def waiting(self, received_bytes: Callable[[], int]) -> Iterator[None]:
        """Measure the body, in which a receiver waits for KV alone; ``received_bytes`` returns the
        bytes of its transfer so far. A body that raises adds to the time, and to no rate."""
        self._update(1)
        began, before = self._clock(), received_bytes()
        try:
            yield
            count, seconds = received_bytes() - before, self._clock() - began
            if count >= MIN_MEASURED_BYTES and seconds > 0:
                self._rates.append(count / seconds)
        finally:
            self._update(-1)

    @property
    def waited_s(self) -> float:
        """Seconds that receivers have waited for KV alone, summed over the receivers."""
        self._update(0)
        return self._waited_s

    @property
    def best_bytes_per_s(self) -> float | None:
        """Best rate of the recent waits; None until one has been long enough."""
        return max(self._rates, default=None)

    def _update(self, started: int) -> None:
        now = self._clock()
        self._waited_s += self._active * (now - self._updated)
        self._updated = now
        self._active += started


@dataclass
class CodecTraffic:
    """KV received with one codec. Bytes include frame headers; ``raw_bytes`` is what the same
    frames would have had with the codec raw; ``seconds`` counts whole transfers."""

    frames: int = 0
    bytes: int = 0
    raw_bytes: int = 0
    failures: int = 0
    seconds: BucketCounts = field(default_factory=lambda: BucketCounts.over(TRANSFER_SECONDS))


@dataclass
class TrafficCounter:
    """All KV that one worker has received."""

    by_codec: dict[Codec, CodecTraffic] = field(default_factory=dict)
    kv_wait: KVWaitMeter = field(default_factory=KVWaitMeter)

    @property
    def bytes(self) -> int:
        """Bytes received so far, headers included."""
        return sum(traffic.bytes for traffic in self.by_codec.values())

    def count_frame(self, kv_format: KVFormat, codec: Codec, piece: KVPiece, nbytes: int) -> None:
        """Count one frame with ``nbytes`` of payload."""
        traffic = self._traffic(codec)
        traffic.frames += 1
        traffic.bytes += HEADER_BYTES + nbytes
        traffic.raw_bytes += HEADER_BYTES + piece.bytes(kv_format.page_layer_bytes(Codec.RAW))

    def count_transfer(self, codec: Codec, seconds: float) -> None:
        """Count a transfer whose frames have all come."""
        self._traffic(codec).seconds.add(seconds, TRANSFER_SECONDS)

    def count_failure(self, codec: Codec) -> None:
        """Count a transfer that broke, or brought a frame that failed a check."""
        self._traffic(codec).failures += 1

    def _traffic(self, codec: Codec) -> CodecTraffic:
        return self.by_codec.setdefault(codec, CodecTraffic())


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
    client: KVClient
    channels: PrefillChannels
    codec: Codec
    traffic: TrafficCounter


class KVReceiver:
    """The receiving end of a worker, which outlives its engine processes. Event loop only."""

    def __init__(
        self,
        engine: EngineClient,
        client: KVClient,
        channels: PrefillChannels,
        codec: CodecChoice,
    ) -> None:
        self._engine = engine
        self._client = client
        self._channels = channels
        self._codec = codec
        self.traffic = TrafficCounter()
        self._slots: tuple[EngineSession, InboundSlots] | None = None

    def context(self) -> ReceiverContext:
        """Return the context of the engine session that serves now; there must be one."""
        session = self._engine.current
        assert session is not None and session.ready is not None
        if self._slots is None or self._slots[0] is not session:
            self._slots = (session, InboundSlots(session))
        codec = choose_codec(session.ready.kv, self._codec)
        return ReceiverContext(
            session, self._slots[1], self._client, self._channels, codec, self.traffic
        )

    async def close(self) -> None:
        await self._channels.close()
