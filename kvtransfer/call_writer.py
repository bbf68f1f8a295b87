"""Writes what the receiver of KV says in a Prefill.Run call after its start.

These are the blocks that it has, credits, slots that it has read, and messages about pairs.
``PrefillRunCall`` has one ``CallWriter`` and uses it on the event loop only.
"""

from __future__ import annotations

import asyncio

import grpc

from kvtransfer.receiver_context import PrefillStream
from protocol.wire import wire_pb2 as pb


class CallWriter:
    """Collects what is to be said in one turn of the event loop, and sends it in few messages."""

    def __init__(self, stream: PrefillStream) -> None:
        self._stream = stream
        self._skip_blocks = 0  # to be said
        self._credits = 0
        self._taken: list[int] = []
        self._pair_messages: list[pb.PairMessage] = []
        self._to_send = asyncio.Event()

    def skip(self, blocks: int) -> None:
        """Say which leading blocks are here. Called once, before ``grant``."""
        self._skip_blocks = blocks
        self._to_send.set()

    def grant(self, frames: int) -> None:
        """Allow so many frames more."""
        self._credits += frames
        self._to_send.set()

    def say(self, message: pb.PrefillCall) -> None:
        """Send a message of a carrier."""
        self._taken += message.taken.sequences
        if message.HasField("pair"):
            self._pair_messages.append(message.pair)
        self._to_send.set()

    async def run(self) -> None:
        """Send until the call is over; reading from it gives the reason then."""
        try:
            while True:
                await self._to_send.wait()
                self._to_send.clear()
                for message in self._collected():
                    await self._stream.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return

    def _collected(self) -> list[pb.PrefillCall]:
        """Return the messages to send, and forget them."""
        messages = [pb.PrefillCall(pair=pair) for pair in self._pair_messages]
        if self._skip_blocks:
            messages.append(pb.PrefillCall(skip_blocks=self._skip_blocks))
        if self._taken:
            taken = pb.PrefillCall.Taken(sequences=self._taken)
            messages.append(pb.PrefillCall(taken=taken))
        if self._credits:
            messages.append(pb.PrefillCall(credits=self._credits))
        self._skip_blocks, self._credits, self._taken, self._pair_messages = 0, 0, [], []
        return messages
