"""The Decode RPC: one stream for each router, carrying all its requests.

taking --drain--> draining: says so, refuses what comes (the router asks another) --> close
   ^                 |  hand_over: what is left goes on elsewhere
   +-----resume------+  streams end, so that routers attach anew
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc

from decode_worker.request import Job, invalid
from decode_worker.router_link import RouterLink
from engine.process.client import EngineClient
from kvtransfer.receiver_context import Receiver
from protocol.block_keys import BLOCK_TOKENS
from protocol.endpoints.grpc_endpoints import INSTANCE_KEY
from protocol.errors import InvalidRequest
from protocol.requests import Request, from_wire
from protocol.wire import wire_pb2 as pb
from protocol.wire import wire_pb2_grpc as rpc

Context: TypeAlias = "grpc.aio.ServicerContext[pb.RouterMessage, pb.WorkerMessage]"


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

    def hand_over(self, why: str) -> int:
        """Give all requests back to their routers, to go on elsewhere; how many."""
        return sum(link.hand_over(why) for link in list(self._links))

    def resume(self) -> None:
        """Take requests again. Routers that were told otherwise find out by attaching anew."""
        if self.draining:
            self.draining = False
            self._close_links()

    async def close(self) -> None:
        """Hand over what is left, and end every stream."""
        self.hand_over("the worker goes")
        self._close_links()

    def _close_links(self) -> None:
        for link in list(self._links):
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
