"""Control channels to prefill workers."""

from __future__ import annotations

from typing import TypeAlias

import grpc

from protocol import auth
from protocol import wire_pb2 as pb
from protocol import wire_pb2_grpc as rpc
from protocol.rpc import channel_options

PrefillCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.PrefillCall, pb.PrefillEvent]"


class Prefillers:
    """One channel for each endpoint, opened when first needed."""

    def __init__(self, token: str) -> None:
        self._metadata = auth.metadata(token)
        self._channels: dict[str, grpc.aio.Channel] = {}

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
