"""Control channels to prefill workers."""

from __future__ import annotations

import asyncio
import time
from typing import TypeAlias

import grpc

from kvtransfer.channels import Channels
from protocol import auth
from protocol import wire_pb2 as pb
from protocol import wire_pb2_grpc as rpc
from protocol.security import LOOPBACK, Security

SUSPECT_S = 5.0
"""For so long nobody turns to a worker that was found silent; the directory lists it no longer."""

PrefillCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.PrefillCall, pb.PrefillEvent]"


class Prefillers:
    """One channel for each endpoint, opened when first needed."""

    def __init__(self, token: str, security: Security = LOOPBACK) -> None:
        self._metadata = auth.metadata(token)
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
