"""The receiving end: pulls the frames of one transfer into slots, checking each.

The thread of a pull does what costs time (checksum, copy into shared memory); the event loop does
the rest. A frame that fails a check ends the transfer, and nothing of it has touched a live page.
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from engine.kv_cache.kv_format import Piece
from engine.process.session import Session
from kvtransfer.frames import Expectation, unpack
from kvtransfer.prefill_channels import Channels
from kvtransfer.sender import PULL
from protocol.endpoints.grpc_endpoints import LOOPBACK, Security
from protocol.errors import TransferFailed
from protocol.security import cluster_token

MAX_PULLS = 256

Arrived = Callable[[int, Piece, int], None]
"""(slot, piece, nbytes): a checked frame lies in the slot. Event loop only."""


class Pull:
    """One transfer in progress. ``add_slot`` for every credit granted."""

    def __init__(
        self,
        call: Iterator[bytes],
        expectation: Expectation,
        view: Callable[[int, int], memoryview],
        arrived: Arrived,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._call = call
        self._expectation = expectation
        self._view = view
        self._arrived = arrived
        self._loop = loop
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()

    def add_slot(self, slot: int) -> None:
        self._slots.put(slot)

    def unused_slots(self) -> list[int]:
        """Slots that no frame came for; to be asked once the pull is over."""
        slots = []
        while not self._slots.empty():
            slots.append(self._slots.get_nowait())
        return slots

    def cancel(self) -> None:
        self._call.cancel()  # type: ignore[attr-defined]

    def run(self) -> None:
        """Take every frame; blocks. Raises TransferFailed."""
        try:
            for data in self._call:
                self._accept(data)
                if self._expectation.complete:
                    self.cancel()  # nothing more is due: do not wait for the sender to say so
                    return
        except grpc.RpcError as error:
            raise TransferFailed(f"the KV stream broke: {error.code().name}") from error
        if not self._expectation.complete:
            raise TransferFailed("the KV stream ended before its last frame")

    def _accept(self, data: bytes) -> None:
        header, payload = unpack(data)
        self._expectation.check(header)
        try:
            slot = self._slots.get_nowait()
        except queue.Empty:
            raise TransferFailed(f"frame {header.sequence} came without a credit") from None
        self._view(slot, header.nbytes)[:] = payload
        self._loop.call_soon_threadsafe(self._arrived, slot, header.piece, header.nbytes)


class KVSink:
    """Channels to the KV servers of others, and the threads that read from them."""

    def __init__(self, token: str, security: Security = LOOPBACK) -> None:
        self._metadata = cluster_token.metadata(token)
        self._security = security
        self._channels = Channels(security.channel, grpc.Channel.close)
        self._threads = ThreadPoolExecutor(MAX_PULLS, thread_name_prefix="kv-sink")

    def open(
        self,
        endpoint: str,
        expectation: Expectation,
        view: Callable[[int, int], memoryview],
        arrived: Arrived,
    ) -> Pull:
        """Open the stream of one transfer; ``run`` it with ``finish``. Raises TransferFailed for an
        endpoint that may not be dialled."""
        channel = self._channels.get(endpoint, self._security.version)
        method: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(PULL)
        call = method(expectation.transfer, metadata=self._metadata)
        return Pull(call, expectation, view, arrived, asyncio.get_running_loop())

    async def finish(self, pull: Pull) -> None:
        """Read the transfer to its end. Raises TransferFailed. When cancelled, the stream is
        cancelled, and this returns only after its thread has let go of the slots."""
        running = self._threads.submit(pull.run)
        waiting = asyncio.wrap_future(running)
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            pull.cancel()
            if not running.cancel():  # it has a thread already
                await asyncio.wait([waiting])
                if not waiting.cancelled():
                    waiting.exception()
            raise

    def close(self) -> None:
        for channel in self._channels.drain():
            channel.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


# MERGED kvtransfer.slots
# Inbound slots of the arena, shared among the transfers that arrive.
#
# A receiver grants its sender one credit for each slot it holds, so that a frame that arrives
# always
# has a place, and memory is bounded however many transfers there are. Slots go round in turn.

Grant = Callable[[int], None]
"""Called with a slot that the taker now holds."""


class InboundSlots:
    """Gives the free slots of one engine session to whoever waits. Event loop only."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._waiting: deque[tuple[object, Grant]] = deque()
        session.on_inbound_free = self._serve

    def ask(self, owner: object, grant: Grant) -> None:
        """Get one slot, now or later."""
        self._waiting.append((owner, grant))
        self._serve()

    def withdraw(self, owner: object) -> None:
        """Wait for nothing any more."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] is not owner)

    def give_back(self, slots: list[int]) -> None:
        """Slots that were granted and not used."""
        self._session.inbound += slots
        self._serve()

    def _serve(self) -> None:
        free = self._session.inbound
        while free and self._waiting:
            _, grant = self._waiting.popleft()
            grant(free.pop())
