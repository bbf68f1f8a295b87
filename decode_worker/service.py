"""The Decode RPC: one stream for each router, which carries all its requests.

serving --drain--> draining: refuses new requests (the router asks another worker) --> close
   ^                  |  hand_back: the requests that are left go on elsewhere
   +------resume------+  streams end, so that routers attach again

The stream to each router is a ``RouterLink``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from typing import TypeAlias

import grpc
from msgspec.structs import asdict

from decode_worker.request import DecodeRequest, invalid_request_output
from decode_worker.router_link import RouterLink
from engine.process.client import EngineClient
from kvtransfer.receiver_context import KVReceiver
from protocol.block_keys import BLOCK_TOKENS
from protocol.endpoints.grpc_endpoints import INSTANCE_KEY
from protocol.errors import InvalidRequest
from protocol.requests import Request, request_from_wire
from protocol.wire import wire_pb2 as pb
from protocol.wire import wire_pb2_grpc as rpc

PUSH_S = 0.02
"""Least time from one comparison of the load with what routers know, and one push, to the next; for
up to ROUTERS_TOLD routers."""

ROUTERS_TOLD = 4
"""Pushes are rarer with more routers, so that the worker sends no more messages. With eight routers
that costs 1% of the goodput if cores are free (``bench/router/many_routers.py``)."""

_REQUESTS_SHARE, _KV_SHARE = 0.05, 0.03  # changes that are pushed, as in engine/process/meter.py
_NEW_PROMPTS = 4  # are pushed, too: until a load names them, routers count them beside the last one


def push_interval_s(routers: int) -> float:
    """Return the least time from one push to so many routers to the next."""
    return PUSH_S * max(1.0, routers / ROUTERS_TOLD)


def load_has_changed(load: pb.Load, told: pb.Load) -> bool:
    """Return whether the load differs from the one told before by enough to change a placement."""
    requests, before = load.running + load.waiting, told.running + told.waiting
    tokens, queued = load.queued_tokens, told.queued_tokens
    kv_tokens = max(
        abs(load.kv_tokens_free - told.kv_tokens_free),
        abs(load.kv_tokens_unused - told.kv_tokens_unused),
    )
    new_prompts = set(load.latest_prompts).difference(told.latest_prompts)
    return (
        load.down != told.down
        or len(new_prompts) >= _NEW_PROMPTS
        or abs(requests - before) > _REQUESTS_SHARE * before
        or abs(tokens - queued) > _REQUESTS_SHARE * queued
        or kv_tokens > _KV_SHARE * load.kv_tokens_total
    )


Context: TypeAlias = "grpc.aio.ServicerContext[pb.RouterMessage, pb.WorkerMessage]"


class DecodeService(rpc.DecodeServicer):
    """Serves Decode.Attach on the engine of this worker. ``Worker`` creates one, whatever its
    role."""

    def __init__(self, engine: EngineClient, receiver: KVReceiver, instance: str) -> None:
        self._engine = engine
        self._receiver = receiver
        self._instance = instance
        self._links: set[RouterLink] = set()
        self._told = pb.Load()  # the load that was pushed last
        self._checked_at = -math.inf
        self._check: asyncio.TimerHandle | None = None
        self.draining = False
        engine.on_load = self._on_load

    @property
    def _promised_tokens(self) -> int:
        """Number of tokens that the requests here will need pages for, and have none for yet."""
        return sum(request.promised_tokens for request in self._requests())

    def _requests(self) -> Iterator[DecodeRequest]:
        return (request for link in self._links for request in link.requests.values())

    @property
    def request_count(self) -> int:
        """Number of requests on this worker, in any state."""
        return sum(len(link.requests) for link in self._links)

    def drain(self) -> None:
        """Take no further requests, and tell the routers."""
        self.draining = True
        for link in self._links:
            link.announce_draining()

    def hand_back(self, why: str) -> int:
        """Hand all requests back to their routers, to go on elsewhere; return how many."""
        return sum(link.hand_back(why) for link in list(self._links))

    def resume(self) -> None:
        """Take requests again. Closing the streams makes the routers attach again and notice it."""
        if self.draining:
            self.draining = False
            self._close_links()

    async def close(self) -> None:
        """Hand back the requests that are left, and end every stream."""
        self.hand_back("the worker is stopping")
        self._close_links()

    def _close_links(self) -> None:
        for link in list(self._links):
            link.close()

    async def Attach(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.RouterMessage], context: Context
    ) -> AsyncIterator[pb.WorkerMessage]:
        for key, value in context.invocation_metadata() or ():
            if key == INSTANCE_KEY and value != self._instance:
                await context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION, "another worker is running at this address"
                )
        link = RouterLink(self._on_load)
        self._links.add(link)
        if self.draining:
            link.announce_draining()

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
                    if (request := link.requests.get(name)) is not None:
                        request.cancel()
        finally:
            link.close()

    def _submit(self, submit: pb.Submit, link: RouterLink) -> None:
        name = submit.request.id
        link.submits_seen += 1
        self._on_load()

        def refuse(why: str, *, moved: bool = False) -> None:
            output = pb.Output(id=name, finish=pb.FINISH_ERROR, error=why)
            output.retryable = output.moved = moved
            link.emit(output)

        if self.draining:
            return refuse("this worker is draining", moved=True)
        if name in link.requests:
            return refuse("a request with this id is already being served")
        try:
            request = request_from_wire(submit.request)
            self._check_length(request)
        except InvalidRequest as error:
            return link.emit(invalid_request_output(name, error))
        link.requests[name] = DecodeRequest(
            request, submit, self._engine, self._receiver, link.emit, link.forget
        )
        return None

    def _on_load(self) -> None:
        """Compare the load soon with what routers know, as it may have changed."""
        if self._links and self._check is None:
            loop = asyncio.get_running_loop()
            due = self._checked_at + push_interval_s(len(self._links))
            self._check = loop.call_at(due, self._push_load)

    def _push_load(self) -> None:
        self._check, self._checked_at = None, asyncio.get_running_loop().time()
        load = self._load()
        if load_has_changed(load, self._told):
            self._told = load
            for link in self._links:
                link.push_load()

    def _check_length(self, request: Request) -> None:
        """Raise InvalidRequest for a request that is too long, before its prompt goes to the
        engine."""
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
        kv_tokens = beat.pages_free * BLOCK_TOKENS
        awaited = sum(request.awaited_tokens for request in self._requests())
        return pb.Load(
            running=beat.running,
            waiting=max(beat.waiting, self.request_count - beat.running),
            queued_tokens=session.queued_tokens,
            kv_tokens_free=max(0, kv_tokens - self._promised_tokens),
            kv_tokens_unused=max(0, kv_tokens - awaited),
            kv_tokens_total=session.ready.kv_tokens,
            queued_prompts=session.queued_prompts,
            computed_tokens=beat.computed_tokens,
            speculation=pb.Speculation(**asdict(beat.profile)) if beat.profile else None,
            routers=len(self._links),
            latest_prompts=session.latest_prompts,
            names_prompts=True,
        )
