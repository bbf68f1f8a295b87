"""Cached blocks of another worker, brought into the prefix cache of this one.

    Import --Importing--> Prefill.Run(cached_only) --started--> PullKV: frames --> Ingest
       last frame in, or something went wrong --> Adopt --Adopted--> found by whoever comes next

A fetch spares work, and nothing depends on it: whatever becomes of it, the request goes on with
what is cached then. The engine ends an import itself when others need its pages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from engine.ipc import messages as m
from kvtransfer.prefill_call import Control
from kvtransfer.receiver_context import Links
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import TransferFailed
from protocol.requests import Finish, Logprobs, Request, Sampling
from protocol.wire import wire_pb2 as pb

log = logging.getLogger("baton.kv")

FETCH_S = 20.0
"""All of a fetch; what comes later is computed sooner."""

START_S = 2.0
"""From the call to ``started``: the other engine only looks into its cache."""

FRAME_S = 2.0
"""The longest gap between frames: every one of them is there to be sent."""

ADOPT_S = 5.0
"""How long the engine may take to answer in the end; it does so at its next step boundary."""

Mark = Callable[[str], None]
"""Told of ``fetch_started`` and ``fetch_done``, the latter only when something came."""


class Fetch:
    """One fetch of what ``source`` is thought to have of a request's context. A Listener of its
    import."""

    def __init__(
        self, links: Links, handle: int, request: Request, source: pb.Fetch, mark: Mark
    ) -> None:
        self._links = links
        self._handle = handle
        self._request = request
        self._source = source
        self._mark = mark
        self._here: m.Importing | None = None
        self._looked_up = asyncio.Event()
        self._adopted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Until the blocks are cached here, or will not be."""
        wanted = leading(self._request, self._source.blocks)
        session = self._links.session
        if not wanted.prompt or not session.alive:
            return
        session.attach(self._handle, self)
        session.send(m.Import(self._handle, wanted))
        try:
            if await self._bring(wanted):
                self._mark("fetch_done")
        finally:
            session.detach(self._handle)
            session.send(m.Adopt(self._handle))

    async def _bring(self, wanted: Request) -> bool:
        """Whether more is cached now than before."""
        transfer = asyncio.create_task(self._transfer(wanted))
        first: list[asyncio.Future[Any]] = [transfer, self._adopted]
        try:
            await asyncio.wait(first, timeout=FETCH_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            transfer.cancel()
            await asyncio.wait([transfer])
        if not transfer.cancelled() and (error := transfer.exception()) is not None:
            bug = None if isinstance(error, TransferFailed) else error
            log.warning("request %s: a fetch failed: %s", self._request.id, error, exc_info=bug)
        self._links.session.send(m.Adopt(self._handle))
        await asyncio.wait([self._adopted], timeout=ADOPT_S)
        if not self._adopted.done() or self._here is None:
            return False
        return self._adopted.result() > self._here.cached_blocks * BLOCK_TOKENS

    async def _transfer(self, wanted: Request) -> None:
        """Bring the missing blocks in, as far as there is room. Raises TransferFailed."""
        source = self._source
        call = self._links.prefillers.run(source.endpoint)  # opens while the engine looks
        control = Control(self._links, self._mark)
        async with control.over(call):
            await self._looked_up.wait()
            here = self._here
            assert here is not None
            if here.blocks <= here.cached_blocks:
                return
            self._mark("fetch_started")
            wanted = leading(wanted, here.blocks)
            await control.open(call, wanted, source.instance, here.cached_blocks, cached_only=True)
            async with asyncio.timeout(START_S):
                started = (await control.next("started")).started
            there = min(started.cached_tokens // BLOCK_TOKENS, here.blocks)
            if there <= here.cached_blocks:
                raise TransferFailed("the other worker does not have the blocks any more")
            incoming = control.incoming(self._handle, here.cached_blocks, there)
            receiving = asyncio.create_task(incoming.run(source.kv_endpoint))
            try:
                with self._links.traffic.tails.waiting(lambda: incoming.bytes):
                    await control.watch(receiving, incoming, FRAME_S)
            except TransferFailed:
                incoming.broke()
                raise
            finally:
                call.cancel()  # first of all: the other worker's pages are free
                receiving.cancel()
                await asyncio.wait([receiving])

    # ---- what the engine says ---------------------------------------------------------------

    def on_event(self, event: m.Event) -> None:
        if isinstance(event, m.Importing):
            self._here = event
            self._looked_up.set()
        elif isinstance(event, m.Adopted):
            self._end(event.cached_tokens)
        elif isinstance(event, m.Refused):
            self._end(0)

    def on_token(self, token: int, finish: Finish, logprobs: Logprobs | None) -> None:
        raise AssertionError("an import computes nothing")

    def on_lost(self) -> None:
        self._end(0)

    def _end(self, cached_tokens: int) -> None:
        if not self._adopted.done():
            self._adopted.set_result(cached_tokens)


def leading(request: Request, blocks: int) -> Request:
    """The first full blocks of the context, at most ``blocks``, as a prompt."""
    tokens = min(blocks, len(request.context) // BLOCK_TOKENS) * BLOCK_TOKENS
    return Request(
        id=request.id,
        prompt=request.context[:tokens],
        sampling=Sampling(max_tokens=1),
        cache_root=request.cache_root,
        priority=request.priority,
    )
