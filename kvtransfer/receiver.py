"""Pulls the frames of a transfer from the KV server of another worker into inbound slots.

The thread of a pull does what costs time: it checks each frame and copies its payload into shared
memory. Everything else happens on the event loop. A frame that fails a check ends the transfer;
nothing of it has touched a page.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from engine.kv_cache.kv_format import KVPiece
from engine.process.session import EngineSession
from kvtransfer.frames import ExpectedFrames, unpack_frame
from kvtransfer.sender import PULL_METHOD
from protocol.endpoints.grpc_endpoints import LOOPBACK_ONLY, ChannelCache, EndpointSecurity
from protocol.errors import TransferFailed
from protocol.security.cluster_token import token_metadata

MAX_PULLS = 256

FrameHandler = Callable[[int, KVPiece, int], None]
"""Called with (slot, piece, payload bytes) on the event loop: a checked frame lies in the slot."""


class KVPull:
    """One KV stream in progress. Its owner adds a slot for every credit that it grants."""

    def __init__(
        self,
        stream: Iterator[bytes],
        expected: ExpectedFrames,
        slot_view: Callable[[int, int], memoryview],
        on_frame: FrameHandler,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._stream = stream
        self._expected = expected
        self._slot_view = slot_view
        self._on_frame = on_frame
        self._loop = loop
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()

    def add_slot(self, slot: int) -> None:
        self._slots.put(slot)

    def unused_slots(self) -> list[int]:
        """Return the slots that no frame has filled; call it once the pull is over."""
        slots = []
        while not self._slots.empty():
            slots.append(self._slots.get_nowait())
        return slots

    def cancel(self) -> None:
        self._stream.cancel()  # type: ignore[attr-defined]

    def read_frames(self) -> None:
        """Take every frame; blocks the calling thread. Raises TransferFailed."""
        try:
            for data in self._stream:
                self._accept(data)
                if self._expected.complete:
                    self.cancel()  # no frame is missing: do not wait for the sender to say so
                    return
        except grpc.RpcError as error:
            raise TransferFailed(f"the KV stream broke: {error.code().name}") from error
        if not self._expected.complete:
            raise TransferFailed("the KV stream ended before its last frame")

    def _accept(self, data: bytes) -> None:
        """Check a frame and copy its payload into a granted slot. Raises TransferFailed."""
        header, payload = unpack_frame(data)
        self._expected.check(header)
        try:
            slot = self._slots.get_nowait()
        except queue.Empty:
            raise TransferFailed(f"frame {header.sequence} came without a credit") from None
        self._slot_view(slot, header.nbytes)[:] = payload
        self._loop.call_soon_threadsafe(self._on_frame, slot, header.piece, header.nbytes)


class KVClient:
    """Channels to the KV servers of other workers, and the threads that read from them. A worker
    has one, whichever engine process it runs."""

    def __init__(self, token: str, security: EndpointSecurity = LOOPBACK_ONLY) -> None:
        self._metadata = token_metadata(token)
        self._security = security
        self._channels = ChannelCache(security.channel, grpc.Channel.close)
        self._threads = ThreadPoolExecutor(MAX_PULLS, thread_name_prefix="kv-sink")

    def open(
        self,
        endpoint: str,
        expected: ExpectedFrames,
        slot_view: Callable[[int, int], memoryview],
        on_frame: FrameHandler,
    ) -> KVPull:
        """Open the KV stream of one transfer; ``read_to_end`` reads it. ``slot_view(slot, nbytes)``
        returns the first bytes of an inbound slot.

        Raises TransferFailed for an endpoint that may not be dialled."""
        channel = self._channels.get(endpoint, self._security.version)
        method: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(PULL_METHOD)
        stream = method(expected.transfer, metadata=self._metadata)
        return KVPull(stream, expected, slot_view, on_frame, asyncio.get_running_loop())

    async def read_to_end(self, pull: KVPull) -> None:
        """Read every frame of ``pull``. Raises TransferFailed.

        When it is cancelled, it cancels the stream, and returns only after the thread has let go of
        the slots."""
        running = self._threads.submit(pull.read_frames)
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


CREDITS_AT_START = 2
"""Frames under way before the first one has come: until then the prompt may still wait to be
computed, and slots that its transfer holds would be missing for others."""


CREDITS_WHILE_FLOWING = 4
"""Frames under way once the first one has come."""


class CreditWindow:
    """Credits of one transfer of ``total`` frames, and how long its sender has been silent."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._requested = 0
        self._granted = 0
        self._arrived = 0
        self._last_progress = clock()

    def request_slots(self) -> int:
        """Return how many slots to request now, and count them as requested."""
        size = CREDITS_WHILE_FLOWING if self._arrived else CREDITS_AT_START
        count = min(self._total - self._requested, size - (self._requested - self._arrived))
        self._requested += count
        return count

    def granted(self) -> None:
        """Record that the sender has one credit more."""
        if self._granted == self._arrived:
            self._last_progress = self._clock()
        self._granted += 1

    def arrived(self) -> None:
        """Record that a frame has come."""
        self._arrived += 1
        self._last_progress = self._clock()

    def stalled_s(self) -> float:
        """Return the seconds for which the sender has held a credit and sent nothing."""
        return 0.0 if self._granted == self._arrived else self._clock() - self._last_progress


class InboundSlots:
    """Shares the free inbound slots of one engine session among its transfers, first come, first
    served. ``KVReceiver`` creates one for each session."""

    def __init__(self, session: EngineSession) -> None:
        self._session = session
        self._waiting: deque[tuple[object, Callable[[int], None]]] = deque()
        session.on_inbound_free = self._serve

    def request(self, owner: object, on_granted: Callable[[int], None]) -> None:
        """Call ``on_granted`` with a slot that ``owner`` then holds, now or later."""
        self._waiting.append((owner, on_granted))
        self._serve()

    def cancel_requests(self, owner: object) -> None:
        """Grant no further slot to ``owner``."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] is not owner)

    def release(self, slots: list[int]) -> None:
        """Take back slots that were granted and not used."""
        self._session.inbound += slots
        self._serve()

    def _serve(self) -> None:
        free = self._session.inbound
        while free and self._waiting:
            _, on_granted = self._waiting.popleft()
            on_granted(free.pop())
