"""Control channels to prefill workers."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

import grpc

from protocol.endpoints.grpc_endpoints import LOOPBACK, Security
from protocol.security import cluster_token
from protocol.wire import wire_pb2 as pb
from protocol.wire import wire_pb2_grpc as rpc

# MERGED kvtransfer.channels
# One gRPC channel for each endpoint, while it is in use.

IDLE_S = 600.0
"""Longer than any call lasts: a channel that nobody has asked for since then serves no one. Workers
that restart come back on other ports, and what led to the old ones would pile up."""

C = TypeVar("C")


class Channels(Generic[C]):
    """Opens channels when first asked for, and closes those that have been idle."""

    def __init__(
        self,
        open_channel: Callable[[str], C],
        close_channel: Callable[[C], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open, self._close, self._clock = open_channel, close_channel, clock
        # By endpoint and version; the longest unused first.
        self._channels: OrderedDict[tuple[str, int], tuple[C, float]] = OrderedDict()

    def get(self, endpoint: str, version: int = 0) -> C:
        """The channel to ``endpoint`` (host:port). With another ``version`` it is another one; what
        runs on the old one goes on."""
        now, key = self._clock(), (endpoint, version)
        channel, _ = self._channels.pop(key, (None, 0.0))
        if channel is None:
            channel = self._open(endpoint)
        self._channels[key] = (channel, now)
        while now - next(iter(self._channels.values()))[1] > IDLE_S:
            _, (idle, _) = self._channels.popitem(last=False)
            self._close(idle)
        return channel

    def drain(self) -> list[C]:
        """All of them, to be closed by the caller; none is kept."""
        channels = [channel for channel, _ in self._channels.values()]
        self._channels.clear()
        return channels


SUSPECT_S = 5.0
"""For so long nobody turns to a worker that was found silent; the directory lists it no longer."""

PrefillCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.PrefillCall, pb.PrefillEvent]"


class Prefillers:
    """One channel for each endpoint, opened when first needed."""

    def __init__(self, token: str, security: Security = LOOPBACK) -> None:
        self._metadata = cluster_token.metadata(token)
        self._security = security
        self._channels = Channels(security.async_channel, self._retire)
        self._closing: set[asyncio.Task[None]] = set()
        self._suspected: dict[str, float] = {}  # endpoint -> until when

    def suspect(self, endpoint: str) -> None:
        """Somebody found that the worker there died or stands still."""
        now = time.monotonic()
        self._suspected = {e: until for e, until in self._suspected.items() if until > now}
        self._suspected[endpoint] = now + SUSPECT_S

    def suspected(self, endpoint: str) -> bool:
        """Whether to ask somebody else for the moment."""
        if time.monotonic() > self._suspected.get(endpoint, 0.0):
            self._suspected.pop(endpoint, None)
            return False
        return True

    def run(self, endpoint: str) -> PrefillCall:
        """Open a Prefill.Run call; whoever opens it cancels it. Raises TransferFailed for an
        endpoint that may not be dialled."""
        channel = self._channels.get(endpoint, self._security.version)
        stub: rpc.PrefillAsyncStub = rpc.PrefillStub(channel)
        return stub.Run(metadata=self._metadata)

    def _retire(self, channel: grpc.aio.Channel) -> None:
        closing = asyncio.create_task(channel.close(), name="idle channel")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for channel in self._channels.drain():
            await channel.close()
