"""What goes to one router, on the one stream that it has to this worker.

Outputs of one turn of the event loop (one engine step, as a rule) leave as one message. The queue
towards a router is bounded; a router that does not read loses its stream, not our memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from decode_worker.request import Job
from protocol.wire import wire_pb2 as pb

log = logging.getLogger("baton.decode")

HEARTBEAT_S = 0.5
MAX_QUEUED = 2048
"""Messages that may wait for one router."""


class RouterLink:
    """What goes to one router, and the jobs that it has here."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.closed = False
        self._outputs: list[pb.Output] = []
        self._queue: asyncio.Queue[pb.WorkerMessage | None] = asyncio.Queue()

    def forget(self, job: Job) -> None:
        self.jobs.pop(job.request.id, None)

    def emit(self, output: pb.Output) -> None:
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

    def say_draining(self) -> None:
        """Nothing new is taken here any more."""
        self._queue.put_nowait(pb.WorkerMessage(draining=True))

    def hand_over(self, why: str) -> int:
        """Give every job back to the router, to go on elsewhere; how many."""
        jobs = list(self.jobs.values())
        for job in jobs:
            job.hand_over(why)
        return len(jobs)

    def close(self) -> None:
        """End the stream after what is queued; its jobs are cancelled. Idempotent."""
        if self.closed:
            return
        if self._outputs:
            self._flush()
        self.closed = True
        self._queue.put_nowait(None)
        for job in list(self.jobs.values()):
            job.cancel()

    async def messages(self, load: Callable[[], pb.Load]) -> AsyncIterator[pb.WorkerMessage]:
        """Messages to send, with the load at least every HEARTBEAT_S."""
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
