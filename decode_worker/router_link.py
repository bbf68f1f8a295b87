"""The stream from this decode worker to one router, and the requests of that router here.

The outputs of one turn of the event loop (as a rule, one engine step) leave as one message. The
queue towards a router is bounded: a router that does not read loses its stream instead of filling
the memory of the worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from decode_worker.request import DecodeRequest
from protocol.wire import wire_pb2 as pb

log = logging.getLogger("baton.decode")

HEARTBEAT_S = 0.5
MAX_QUEUED = 2048
"""Messages that may wait for one router."""


class RouterLink:
    """One Decode.Attach stream. ``DecodeService`` creates it, and closes it when the stream
    ends."""

    def __init__(self) -> None:
        self.requests: dict[str, DecodeRequest] = {}  # by request id
        self.closed = False
        self._outputs: list[pb.Output] = []
        self._queue: asyncio.Queue[pb.WorkerMessage | None] = asyncio.Queue()

    def forget(self, request: DecodeRequest) -> None:
        self.requests.pop(request.request.id, None)

    def emit(self, output: pb.Output) -> None:
        """Send an output with the others of this turn of the event loop."""
        if self.closed:
            return
        if not self._outputs:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outputs.append(output)
        if output.prompt_logprobs:
            self._flush()  # some MiB: several might not fit into one message

    def _flush(self) -> None:
        if self.closed or not self._outputs:
            return
        self._queue.put_nowait(pb.WorkerMessage(outputs=self._outputs))
        self._outputs = []
        if self._queue.qsize() > MAX_QUEUED:
            log.error("a router does not read: %d messages wait, closing its stream", MAX_QUEUED)
            while not self._queue.empty():
                self._queue.get_nowait()
            self.close()

    def announce_draining(self) -> None:
        """Tell the router that this worker takes no further requests."""
        self._queue.put_nowait(pb.WorkerMessage(draining=True))

    def hand_back(self, why: str) -> int:
        """Hand every request back to the router, to go on elsewhere; return how many."""
        requests = list(self.requests.values())
        for request in requests:
            request.hand_back(why)
        return len(requests)

    def close(self) -> None:
        """Cancel the requests, and end the stream after what is queued. Idempotent."""
        if self.closed:
            return
        if self._outputs:
            self._flush()
        self.closed = True
        self._queue.put_nowait(None)
        for request in list(self.requests.values()):
            request.cancel()

    async def messages(self, load: Callable[[], pb.Load]) -> AsyncIterator[pb.WorkerMessage]:
        """Yield the messages to send; one every HEARTBEAT_S at least carries the load."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            message: pb.WorkerMessage | None
            try:
                async with asyncio.timeout_at(due):
                    message = await self._queue.get()
            except TimeoutError:
                message = pb.WorkerMessage()
            if message is None:
                return
            if loop.time() >= due:
                message.load.CopyFrom(load())
                due = loop.time() + HEARTBEAT_S
            yield message
