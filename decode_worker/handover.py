"""One attempt to have a prompt prefilled on another worker and its KV brought to this one.

    Prefill.Run --accepted--> --started--> Reserve pages, open the KV stream
       --first_token--> returned at once           frames --> slots --> engine
       last frame given to the engine --> returned; ``DecodeRequest`` sends Join

The decode worker owns both RPCs. Leaving ``open`` ends them, and with the Prefill.Run call the
prefill worker frees its pages of the prompt. Every failure is a TransferFailed: the decode worker
can still compute the prompt itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from engine.ipc import messages as m
from kvtransfer.prefill_call import PrefillRunCall, guarded_by
from kvtransfer.receiver_context import PrefillStream, ReceiverContext
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import InvalidRequest, TransferFailed
from protocol.requests import (
    Finish,
    Logprobs,
    Request,
    logprobs_from_wire,
    logprobs_list_from_wire,
)
from protocol.wire import wire_pb2 as pb

PREFILL_S = 60.0
"""From accepted to first token, queueing included; well within the router's own deadline."""

FRAME_S = 5.0
"""The longest gap between KV frames once the prompt is computed."""

PAGES_S = 20.0
"""How long a handover waits for pages here, while the prefill worker holds its own."""


class FirstToken(NamedTuple):
    """The first token, as the prefill worker drew it."""

    token: int
    finish: Finish
    logprobs: Logprobs | None
    prompt_logprobs: list[Logprobs]
    cached_tokens: int  # of the prompt, on the prefill worker


class Handover:
    """One prefill of ``request`` on the worker that ``candidate`` names, over a call just opened.

    ``handle`` is the sequence here, whose first ``cached_tokens`` tokens are cached here. Created
    by ``DecodeRequest``, which calls ``mark`` events into its timeline through it."""

    def __init__(
        self,
        context: ReceiverContext,
        stream: PrefillStream,
        candidate: pb.PrefillCandidate,
        handle: int,
        request: Request,
        cached_tokens: int,
        mark: Callable[[str], None],
    ) -> None:
        self._context = context
        self._stream = stream
        self._candidate = candidate
        self._handle = handle
        self._request = request
        self._skip_blocks = cached_tokens // BLOCK_TOKENS
        self._mark = mark
        self._call = PrefillRunCall(context, stream, mark)
        end_block = -(-len(request.context) // BLOCK_TOKENS)
        self._inbound = self._call.inbound_transfer(handle, self._skip_blocks, end_block)
        self._receiving: asyncio.Task[None] | None = None
        self.pages_reserved = asyncio.Event()  # set when the engine has answered Reserve

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Run the body, then end both RPCs. Raises TransferFailed for every failure of theirs."""
        try:
            async with self._call.running():
                try:
                    yield
                finally:
                    self._stream.cancel()  # first: it frees the pages of the prefill worker
                    if self._receiving is not None:
                        self._receiving.cancel()
                        await asyncio.wait([self._receiving])
        except TransferFailed:
            self._inbound.count_failure()
            raise

    async def first_token(self) -> FirstToken:
        """Return the first token; KV is received from the start of the prefill on."""
        candidate = self._candidate
        fetch = candidate.fetch if candidate.HasField("fetch") else None
        await self._call.start(self._request, candidate.instance, self._skip_blocks, fetch=fetch)
        self._mark("prefill_queued")
        async with asyncio.timeout(PREFILL_S):
            started = (await self._call.next_event("started")).started
            self._mark("prefill_started")
            self._receiving = asyncio.create_task(self._receive(candidate.kv_endpoint))
            event = await guarded_by(self._receiving, self._call.next_event("first_token"))
        try:
            return self._checked(event.first_token, started.cached_tokens)
        except InvalidRequest as error:
            raise TransferFailed(f"prefill: {error}") from error

    async def remaining_kv(self) -> pb.Measured:
        """Return, once every frame has been given to the engine, what the transfer has taken."""
        assert self._receiving is not None
        inbound = self._inbound
        before, began = inbound.bytes, time.monotonic()
        with self._context.traffic.kv_wait.waiting(lambda: inbound.bytes):
            waiting = self._call.wait_for_kv(self._receiving, inbound, FRAME_S)
            await guarded_by(self._receiving, waiting)
        return pb.Measured(
            prefill_instance=self._candidate.instance,
            kv_tokens=len(self._request.context) - self._skip_blocks * BLOCK_TOKENS,
            kv_bytes=inbound.bytes,
            tail_bytes=inbound.bytes - before,
            tail_seconds=time.monotonic() - began,
        )

    async def _receive(self, kv_endpoint: str) -> None:
        self._context.session.send(m.Reserve(self._handle))
        try:
            async with asyncio.timeout(PAGES_S):
                await self.pages_reserved.wait()
        except TimeoutError as error:
            raise TransferFailed(f"no pages free here within {PAGES_S:g} s") from error
        await self._inbound.run(kv_endpoint)

    def _checked(self, first: pb.PrefillEvent.FirstToken, cached_tokens: int) -> FirstToken:
        """Return the first token if the prefill worker may have drawn it: the peer is not trusted.

        Raises TransferFailed or InvalidRequest."""
        ready = self._context.session.ready
        assert ready is not None
        if first.token >= ready.vocab_size:
            raise TransferFailed(f"prefill: token {first.token} of {ready.vocab_size} came")
        if first.finish not in (pb.FINISH_NONE, pb.FINISH_STOP, pb.FINISH_LENGTH):
            raise TransferFailed(f"prefill: finish {first.finish} came")
        logprobs = logprobs_from_wire(first.logprobs) if first.HasField("logprobs") else None
        if (logprobs is None) != (self._request.sampling.logprobs is None):
            raise TransferFailed("prefill: log-probabilities came or not, unlike asked for")
        due = self._request.prompt_logprobs_due
        prompt_logprobs = logprobs_list_from_wire(first.prompt_logprobs, due)
        return FirstToken(
            first.token, Finish(first.finish), logprobs, prompt_logprobs, cached_tokens
        )
