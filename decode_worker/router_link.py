"""``RouterLink``: the stream from a decode worker to one router, and what waits to be sent on it.

    emit --> waiting, one output for each request --messages()--> a message with all that waits

The outputs of one turn of the event loop, as a rule of one engine step, leave as one message. While
a router reads slowly, further tokens of a request are added to the output that waits, so that the
router gets fewer and larger messages. What waits is bounded: a router that does not read loses its
stream instead of filling the memory of the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable

from decode_worker.request import DecodeRequest
from protocol.wire import wire_pb2 as pb

log = logging.getLogger("baton.decode")

HEARTBEAT_S = 0.5
DOWN_HEARTBEAT_S = 0.05
"""The same while no engine serves: requests wait at routers for the next one to be ready."""
MAX_WAITING_BYTES = 64 << 20
"""Outputs that may wait for one router: minutes of tokens, or the prompt log-probabilities of a
dozen requests."""
MESSAGE_BYTES = 4 << 20
"""Outputs in one message; a larger one is alone in its message. Well below the limit of gRPC."""
MERGED_BYTES = 1 << 20
"""An output that has grown to this size gets no further tokens: they begin another one."""


class _WaitingOutput:
    """What one request has to send. ``size``: bytes, at most."""

    __slots__ = ("output", "size")

    def __init__(self, output: pb.Output, size: int) -> None:
        self.output = output
        self.size = size

    def merge(self, output: pb.Output, size: int) -> None:
        deaths = self.output.deaths + output.deaths
        self.output.MergeFrom(output)  # appends tokens and log-probabilities; later values count
        if deaths:
            self.output.deaths = deaths
        self.size += size


class WaitingOutputs:
    """Outputs that wait for one router, the oldest first. Those of one request are merged."""

    def __init__(self) -> None:
        self._outputs: deque[_WaitingOutput] = deque()
        self._last: dict[str, _WaitingOutput] = {}  # of each request
        self.size = 0  # bytes, at most

    def __bool__(self) -> bool:
        return bool(self._outputs)

    def add(self, output: pb.Output) -> None:
        """Let an output wait. It belongs to this object from now on."""
        size, last = output.ByteSize(), self._last.get(output.id)
        if last is not None and last.size + size <= MERGED_BYTES:
            size -= len(output.id)  # stands there already
            last.merge(output, size)
        else:
            last = self._last[output.id] = _WaitingOutput(output, size)
            self._outputs.append(last)
        if output.finish != pb.FINISH_NONE:
            del self._last[output.id]  # what follows is of another request with this id
        self.size += size

    def take(self) -> list[pb.Output]:
        """Remove and return what waits, up to MESSAGE_BYTES, but at least one output."""
        if self.size <= MESSAGE_BYTES:
            taken = [waiting.output for waiting in self._outputs]
            self.clear()
            return taken
        taken, room = [], MESSAGE_BYTES
        while self._outputs and (self._outputs[0].size <= room or not taken):
            waiting = self._outputs.popleft()
            taken.append(waiting.output)
            room -= waiting.size
            self.size -= waiting.size
            if self._last.get(waiting.output.id) is waiting:
                del self._last[waiting.output.id]
        return taken

    def clear(self) -> None:
        self._outputs.clear()
        self._last.clear()
        self.size = 0


class RouterLink:
    """One Decode.Attach stream. ``DecodeService`` creates it, and closes it when the stream ends.
    ``on_change`` is called whenever a request has ended."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self.requests: dict[str, DecodeRequest] = {}  # by request id
        self.closed = False
        self.submits_seen = 0
        self._waiting = WaitingOutputs()
        self._load_changed = self._draining = False  # to be told
        self._news = asyncio.Event()  # there is something to send

    def forget(self, request: DecodeRequest) -> None:
        self.requests.pop(request.request.id, None)
        self._on_change()

    def emit(self, output: pb.Output) -> None:
        """Send an output with the others of this turn of the event loop."""
        if self.closed:
            return
        self._waiting.add(output)
        # The engine may have died: until routers know, it looks as if it had room for the next one.
        self._load_changed |= output.retryable
        self._news.set()
        if self._waiting.size > MAX_WAITING_BYTES:
            log.error("a router does not read its messages, so its stream is closed")
            self._waiting.clear()
            self._end()  # nothing may follow what is missing now
            asyncio.get_running_loop().call_soon(self._cancel_requests)  # not within their calls

    def push_load(self) -> None:
        """Tell the router the load at once."""
        self._load_changed = True
        self._news.set()

    def announce_draining(self) -> None:
        """Tell the router that this worker takes no further requests."""
        self._draining = True
        self._news.set()

    def hand_back(self, why: str) -> int:
        """Hand every request back to the router, to go on elsewhere; return how many."""
        requests = list(self.requests.values())
        for request in requests:
            request.hand_back(why)
        return len(requests)

    def close(self) -> None:
        """Cancel the requests, and end the stream after what waits. Idempotent."""
        if not self.closed:
            self._end()
            self._cancel_requests()

    def _end(self) -> None:
        self.closed = True
        self._news.set()

    def _cancel_requests(self) -> None:
        for request in list(self.requests.values()):
            request.cancel()

    async def messages(self, load: Callable[[], pb.Load]) -> AsyncIterator[pb.WorkerMessage]:
        """Yield the messages to send. One every HEARTBEAT_S at least carries the load, and so does
        one after ``push_load`` and one that hands a request back."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._news.wait()
            if self.closed and not self._waiting:
                return
            message = self._next_message()
            if self._load_changed or loop.time() >= due:
                self._load_changed = False
                message.load.CopyFrom(load())
                message.load.submits_seen = self.submits_seen
                beat_s = DOWN_HEARTBEAT_S if message.load.down else HEARTBEAT_S
                due = loop.time() + beat_s
            yield message

    def _next_message(self) -> pb.WorkerMessage:
        message = pb.WorkerMessage(outputs=self._waiting.take(), draining=self._draining)
        self._draining = False
        if not self._waiting:
            self._news.clear()
        return message
