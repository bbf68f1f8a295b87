"""gRPC channels to other workers: a cache of them, and those on which Prefill.Run is called."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

import grpc

from protocol.endpoints.grpc_endpoints import LOOPBACK_ONLY, EndpointSecurity
from protocol.security.cluster_token import token_metadata
from protocol.wire import wire_pb2 as pb
from protocol.wire import wire_pb2_grpc as rpc

IDLE_S = 600.0
"""A channel that has not been used for so long is closed; no call lasts longer. Workers that
restart come back on other ports, and the channels to the old ports would pile up."""

SUSPECT_S = 5.0
"""How long a worker that was found dead or silent gets no new prefill; after that its record has
expired in Redis."""

C = TypeVar("C")

PrefillStream: TypeAlias = "grpc.aio.StreamStreamCall[pb.PrefillCall, pb.PrefillEvent]"


class ChannelCache(Generic[C]):
    """One channel for each endpoint, opened when it is first used and closed when it is idle."""

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
        """Return the channel to ``endpoint`` (host:port). Another ``version`` gets another channel;
        calls on the old one go on."""
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
        """Forget all channels and return them; the caller closes them."""
        channels = [channel for channel, _ in self._channels.values()]
        self._channels.clear()
        return channels


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
