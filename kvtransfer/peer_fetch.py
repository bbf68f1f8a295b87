"""Brings blocks that another worker has cached into the prefix cache of this one.

    Import --ImportStarted--> Prefill.Run(cached_only) --started--> KV stream: frames --> Ingest
       last frame in, or a failure --> EndImport --ImportEnded--> the blocks are in the cache

A fetch saves computation, and correctness does not depend on it: whether it succeeds or not, the
request goes on with what is cached then. The engine ends an import itself when other sequences need
its pages. Decode and prefill workers fetch before they compute, where the router names a source.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from engine.ipc import messages as m
from kvtransfer.inbound import InboundTransfer
from kvtransfer.prefill_call import PrefillRunCall
from kvtransfer.receiver_context import ReceiverContext
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import TransferFailed
from protocol.requests import Finish, Logprobs, Request
from protocol.sampling_params import SamplingParams
from protocol.wire import wire_pb2 as pb

log = logging.getLogger("baton.kv")

FETCH_S = 20.0
"""Limit of a whole fetch; computing the blocks is quicker than anything that takes longer."""

START_S = 2.0
"""From the call to ``started``: the other engine only looks into its cache."""

FRAME_S = 2.0
"""The longest gap between frames: all of them are ready to be sent."""

END_IMPORT_S = 5.0
"""How long the engine may take to end the import; it does so at its next step boundary."""


class PeerFetch:
    """One fetch of the blocks of a request's context that ``source`` probably has. It is the
    SequenceListener of its import; ``run`` is all of its life."""

    def __init__(
        self,
        context: ReceiverContext,
        handle: int,
        request: Request,
        source: pb.Fetch,
        mark: Callable[[str], None],
    ) -> None:
        """``mark`` is called with fetch_started, and with fetch_done only when blocks came."""
        self._context = context
        self._handle = handle
        self._request = request
        self._source = source
        self._mark = mark
        self._import: m.ImportStarted | None = None
        self._import_started = asyncio.Event()
        self._inbound: InboundTransfer | None = None
        self._cached_tokens: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Return when the blocks are cached here, or will not be."""
        blocks = leading_blocks(self._request, self._source.blocks)
        session = self._context.session
        if not blocks.prompt or not session.alive or not self._source_may_serve():
            return
        session.attach(self._handle, self)
        session.send(m.Import(self._handle, blocks))
        try:
            if await self._import_blocks(blocks):
                self._mark("fetch_done")
        finally:
            session.detach(self._handle)
            self._end_import()

    def _source_may_serve(self) -> bool:
        """Return whether the other worker is neither suspected to be dead nor unreachable.

        A request that asked it all the same would wait in vain before it computes the blocks."""
        source, context = self._source, self._context
        suspected = context.channels.is_suspected(source.endpoint)
        return not suspected and context.links.usable(source.instance)

    async def _import_blocks(self, blocks: Request) -> bool:
        """Return whether more is cached than before."""
        transfer = asyncio.create_task(self._transfer(blocks))
        first: list[asyncio.Future[Any]] = [transfer, self._cached_tokens]
        try:
            await asyncio.wait(first, timeout=FETCH_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            transfer.cancel()
            await asyncio.wait([transfer])
        if not transfer.cancelled() and (error := transfer.exception()) is not None:
            bug = None if isinstance(error, TransferFailed) else error
            log.warning("request %s: a fetch failed: %s", self._request.id, error, exc_info=bug)
        self._end_import()
        await asyncio.wait([self._cached_tokens], timeout=END_IMPORT_S)
        if not self._cached_tokens.done() or self._import is None:
            return False
        return self._cached_tokens.result() > self._import.cached_blocks * BLOCK_TOKENS

    async def _transfer(self, blocks: Request) -> None:
        """Receive the missing blocks, as far as there are pages. Raises TransferFailed."""
        source = self._source
        stream = self._context.channels.open_call(source.endpoint)  # opens while the engine looks
        call = PrefillRunCall(self._context, stream, self._mark)
        async with call.running():
            await self._import_started.wait()
            here = self._import
            assert here is not None
            if here.blocks <= here.cached_blocks:
                return
            self._mark("fetch_started")
            blocks = leading_blocks(blocks, here.blocks)
            await call.start(blocks, source.instance, source.endpoint, cached_only=True)
            async with asyncio.timeout(START_S):
                started = (await call.next_event("started")).started
            available = min(started.cached_tokens // BLOCK_TOKENS, here.blocks)
            if available <= here.cached_blocks:
                raise TransferFailed("the other worker no longer has the blocks")
            self._inbound = call.inbound_transfer(self._handle, here.cached_blocks, available)
            await self._receive(call, self._inbound)

    @staticmethod
    async def _receive(call: PrefillRunCall, inbound: InboundTransfer) -> None:
        inbound.frames_due()
        receiving = asyncio.create_task(inbound.run(FRAME_S))
        try:
            with inbound.waiting_alone():
                await call.guard(receiving)
        except TransferFailed:
            inbound.count_failure()
            raise
        finally:
            call.end()  # first: it frees the pages of the other worker
            receiving.cancel()
            await asyncio.wait([receiving])

    def _end_import(self) -> None:
        """End the import: no further frame is given to the engine."""
        frames = self._inbound.frames if self._inbound is not None else 0
        self._context.session.send(m.EndImport(self._handle, frames))

    # ---- events of the engine ---------------------------------------------------------------

    def on_event(self, event: m.Event) -> None:
        if isinstance(event, m.ImportStarted):
            self._import = event
            self._import_started.set()
        elif isinstance(event, m.ImportEnded):
            self._end(event.cached_tokens)
        elif isinstance(event, m.SlotRead):
            if self._inbound is not None:
                self._inbound.on_slot_read(event.sequence)
        elif isinstance(event, m.ReceiveFailed):  # ImportEnded follows
            if self._inbound is not None:
                self._inbound.on_receive_failed(event)
        elif isinstance(event, m.RequestRefused):
            self._end(0)

    def on_token(self, token: int, finish: Finish, logprobs: Logprobs | None) -> None:
        raise AssertionError("an import computes nothing")

    def on_lost(self) -> None:
        self._end(0)

    def _end(self, cached_tokens: int) -> None:
        if not self._cached_tokens.done():
            self._cached_tokens.set_result(cached_tokens)


def leading_blocks(request: Request, blocks: int) -> Request:
    """Return a request whose prompt is the first full blocks of the context, at most ``blocks``."""
    tokens = min(blocks, len(request.context) // BLOCK_TOKENS) * BLOCK_TOKENS
    return Request(
        id=request.id,
        prompt=request.context[:tokens],
        sampling=SamplingParams(max_tokens=1),
        cache_root=request.cache_root,
        priority=request.priority,
    )
