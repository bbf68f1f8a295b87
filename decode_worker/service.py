"""The Decode RPC: one stream for each router, carrying all its requests.

Outputs of one turn of the event loop (one engine step, as a rule) leave as one message. The queue
towards a router is bounded; a router that does not read loses its stream, not our memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

import grpc

from decode_worker.job import Job, invalid
from engine.client import EngineClient
from kvtransfer.links import Receiver
from protocol import wire_pb2 as pb
from protocol import wire_pb2_grpc as rpc
from protocol.blocks import BLOCK_TOKENS
from protocol.errors import InvalidRequest
from protocol.request import Request, from_wire
from protocol.rpc import INSTANCE_KEY

log = logging.getLogger("baton.decode")

HEARTBEAT_S = 0.5
MAX_QUEUED = 2048
"""Messages that may wait for one router."""

Context: TypeAlias = "grpc.aio.ServicerContext[pb.RouterMessage, pb.WorkerMessage]"


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

    def hand_over(self, why: str) -> None:
        """Give every job back to the router, to go on elsewhere."""
        for job in list(self.jobs.values()):
            job.hand_over(why)

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


class DecodeService(rpc.DecodeServicer):
    """Serves Decode.Attach on the engine of this worker."""

    def __init__(
        self,
        engine: EngineClient,
        receiver: Receiver,
        local_prefill_tokens: int,
        instance: str,
    ) -> None:
        self._engine = engine
        self._receiver = receiver
        self._instance = instance
        self._local_prefill_tokens = local_prefill_tokens
        self._links: set[RouterLink] = set()
        self.draining = False

    @property
    def jobs(self) -> int:
        """Requests in this worker."""
        return sum(len(link.jobs) for link in self._links)

    def drain(self) -> None:
        """Take nothing new, and say so."""
        self.draining = True
        for link in self._links:
            link.say_draining()

    async def close(self) -> None:
        """Hand over what is left, and end every stream."""
        for link in list(self._links):
            link.hand_over("the worker goes")
            link.close()

    async def Attach(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.RouterMessage], context: Context
    ) -> AsyncIterator[pb.WorkerMessage]:
        for key, value in context.invocation_metadata() or ():
            if key == INSTANCE_KEY and value != self._instance:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another instance is here")
        link = RouterLink()
        self._links.add(link)
        if self.draining:
            link.say_draining()

        def detach(_: Context) -> None:
            reading.cancel()
            link.close()
            self._links.discard(link)

        reading = asyncio.create_task(self._read(request_iterator, link))
        context.add_done_callback(detach)  # type: ignore[arg-type]
        async for message in link.messages(self._load):
            yield message

    async def _read(self, messages: AsyncIterator[pb.RouterMessage], link: RouterLink) -> None:
        try:
            async for message in messages:
                for submit in message.submit:
                    self._submit(submit, link)
                for name in message.cancel:
                    if (job := link.jobs.get(name)) is not None:
                        job.cancel()
        finally:
            link.close()

    def _submit(self, submit: pb.Submit, link: RouterLink) -> None:
        name = submit.request.id

        def refuse(why: str, *, moved: bool = False) -> None:
            output = pb.Output(id=name, finish=pb.FINISH_ERROR, error=why)
            output.retryable = output.moved = moved
            link.emit(output)

        if self.draining:
            return refuse("this worker is draining", moved=True)
        if name in link.jobs:
            return refuse("a request with this id is here already")
        try:
            request = from_wire(submit.request)
            self._check_length(request)
        except InvalidRequest as error:
            return link.emit(invalid(name, error))
        local = self._local_prefill_tokens
        if submit.HasField("local_prefill_tokens"):
            local = submit.local_prefill_tokens
        link.jobs[name] = Job(
            request,
            list(submit.prefill),
            submit.fetch if submit.HasField("fetch") else None,
            self._engine,
            self._receiver.links,
            local,
            link.emit,
            link.forget,
            submit.deaths,
        )
        return None

    def _check_length(self, request: Request) -> None:
        """Refuse here what the engine would, before a long prompt goes there."""
        session = self._engine.current
        ready = session.ready if session is not None else None
        if ready is not None and request.length_limit > ready.max_model_len:
            raise InvalidRequest(
                f"{len(request.prompt)} prompt tokens and max_tokens={request.sampling.max_tokens}"
                f" make {request.length_limit}, over the model's {ready.max_model_len}",
                "max_tokens",
                "context_length_exceeded",
            )

    def _load(self) -> pb.Load:
        session = self._engine.current
        if session is None or session.ready is None:
            return pb.Load(down=True)
        beat = session.beat
        return pb.Load(
            running=beat.running,
            waiting=beat.waiting,
            queued_tokens=beat.queued_tokens,
            kv_tokens_free=beat.pages_free * BLOCK_TOKENS,
            kv_tokens_total=session.ready.kv_tokens,
            step_model=beat.step_model,
            pace=beat.pace,
        )
