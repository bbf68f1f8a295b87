"""Control channels to prefill workers."""

from __future__ import annotations

import time
from typing import TypeAlias

import grpc

from protocol import auth
from protocol import wire_pb2 as pb
from protocol import wire_pb2_grpc as rpc
from protocol.rpc import channel_options

SUSPECT_S = 5.0
"""For so long nobody turns to a worker that was found silent; the directory lists it no longer."""

PrefillCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.PrefillCall, pb.PrefillEvent]"


class Prefillers:
    """One channel for each endpoint, opened when first needed."""

    def __init__(self, token: str) -> None:
        self._metadata = auth.metadata(token)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._suspected: dict[str, float] = {}  # endpoint -> until when

    def suspect(self, endpoint: str) -> None:
        """Somebody found that the worker there died or stands still."""
        self._suspected[endpoint] = time.monotonic() + SUSPECT_S

    def suspected(self, endpoint: str) -> bool:
        """Whether to ask somebody else for the moment."""
        if time.monotonic() > self._suspected.get(endpoint, 0.0):
            self._suspected.pop(endpoint, None)
            return False
        return True

    def run(self, endpoint: str) -> PrefillCall:
        """Open a Prefill.Run call; whoever opens it cancels it."""
        channel = self._channels.get(endpoint)
        if channel is None:
            channel = grpc.aio.insecure_channel(endpoint, options=channel_options())
            self._channels[endpoint] = channel
        stub: rpc.PrefillAsyncStub = rpc.PrefillStub(channel)
        return stub.Run(metadata=self._metadata)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
