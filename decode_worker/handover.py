"""One attempt to have a prompt prefilled on another worker and its KV brought to this one.

    Prefill.Run --accepted--> --started--> (--computed-->) Reserve pages --Reserved--> KV flows
       --first_token--> returned at once                       frames --> slots --> engine
       last frame given to the engine --> returned; ``DecodeRequest`` sends Join

The prefill worker is asked at once. What is cached here, which the engine says at its next step
boundary, is needed only before pages are reserved: then the prefill worker hears which blocks to
leave out.

Pages are reserved when KV is about to flow, which protocol/page_reservation.py decides, and at the
latest on the first token. What the hand-overs of a worker will reserve is promised to them until
then (``DecodeRequest.promised_tokens``).

The decode worker owns both RPCs. Leaving ``open`` ends them, and with the Prefill.Run call the
prefill worker frees its pages of the prompt. Every failure is a TransferFailed: the decode worker
can try again, or compute the prompt itself. Every wait ends: for ``accepted`` after ACCEPT_S
(kvtransfer/prefill_call.py), for the first token after PREFILL_S, whereupon another prefill worker
is asked, for pages after PAGES_S, and for a frame after FRAME_S. The request's own deadlines
(decode_worker/expiry.py) end all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

from engine.ipc import messages as m
from kvtransfer.inbound import InboundTransfer
from kvtransfer.prefill_call import PrefillRunCall, guarded_by
from kvtransfer.receiver_context import PrefillStream, ReceiverContext
from protocol.block_keys import BLOCK_TOKENS
from protocol.errors import InvalidRequest, NoPages, PeerRefused, TransferFailed
from protocol.page_reservation import is_pace_known, reservation_delay_s, reserves_at_start
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
"""How long the prefill worker may send nothing although a frame is due, that is computed, and this
worker has pages and a slot for it. A prompt that waits for its turn owes no frame."""

PAGES_S = 20.0
"""How long a handover waits for pages here, while the prefill worker holds its own. Then it gives
those up; the prefix stays cached there, and the next attempt is as old as this one."""

MAX_RESERVE_S = 0.2
"""Limit of the expected time of a reservation, which the longest step of the warm-up may exceed."""


class FirstToken(NamedTuple):
    """The first token, as the prefill worker drew it."""

    token: int
    finish: Finish
    logprobs: Logprobs | None
    prompt_logprobs: list[Logprobs]
    cached_tokens: int  # of the prompt, on the prefill worker


class Handover:
    """One prefill of ``request`` on the worker that ``candidate`` names, over a call just opened.

    ``handle`` is the sequence here, and ``look_up`` returns how many of its leading tokens are
    cached here, or raises to end the handover. Created by ``DecodeRequest``, into whose timeline
    ``mark`` records events."""

    def __init__(
        self,
        context: ReceiverContext,
        stream: PrefillStream,
        candidate: pb.PrefillCandidate,
        handle: int,
        request: Request,
        look_up: Callable[[], Awaitable[int]],
        mark: Callable[[str], None],
    ) -> None:
        self._context = context
        self._stream = stream
        self._candidate = candidate
        self._handle = handle
        self._request = request
        self._look_up = look_up
        self._skip_blocks = 0  # blocks that are cached here, once the look-up has returned
        self._mark = mark
        self._call = PrefillRunCall(context, stream, mark)
        self._call.on_computed = self._on_computed
        self._inbound: InboundTransfer | None = None  # once it is known what is cached here
        self._receiving: asyncio.Task[None] | None = None
        self._pages = _PageTimer()
        self.pages_reserved = asyncio.Event()  # set when the engine has answered Reserve
        self._flowing = asyncio.Event()  # pages are there: KV may come
        self._cached_there = 0  # leading tokens that the prefill worker did not have to compute
        self._started_s = math.inf  # when the prefill worker has said that it has started

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Run the body, then end both RPCs. Raises TransferFailed for every failure of theirs."""
        try:
            async with self._call.running():
                try:
                    yield
                finally:
                    self._stream.cancel()  # first: it frees the pages of the prefill worker
                    self._pages.cancel()
                    if self._receiving is not None:
                        self._receiving.cancel()
                        await asyncio.wait([self._receiving])
                        if not self._receiving.cancelled():
                            self._receiving.exception()  # retrieved: it may have failed last
        except TransferFailed:
            if self._inbound is not None:
                self._inbound.count_failure()
            raise

    async def first_token(self) -> FirstToken:
        """Return the first token; KV is received from when pages are reserved for it."""
        candidate = self._candidate
        fetch = candidate.fetch if candidate.HasField("fetch") else None
        where, tokens = (candidate.instance, candidate.endpoint), candidate.uncached_tokens
        await self._call.start(self._request, *where, fetch=fetch, uncached_tokens=tokens)
        self._mark("prefill_queued")
        self._receiving = asyncio.create_task(self._receive())
        try:
            async with asyncio.timeout(PREFILL_S):
                waiting = self._call.next_event("started")
                started = (await guarded_by(self._receiving, waiting)).started
                self._mark("prefill_started")
                self._on_started(started.cached_tokens)
                event = await guarded_by(self._receiving, self._call.next_event("first_token"))
        except TimeoutError as error:  # asking the same worker again would take as long
            raise PeerRefused(f"prefill: no first token within {PREFILL_S:g} s") from error
        try:
            first = self._checked(event.first_token, started.cached_tokens)
        except InvalidRequest as error:
            raise TransferFailed(f"prefill: {error}") from error
        if first.finish is Finish.NONE:
            self._pages.due.set()
        return first

    async def remaining_kv(self) -> pb.Measured:
        """Return, once every frame has been given to the engine, what the transfer has taken. The
        time for which this worker had no pages is no part of it."""
        assert self._receiving is not None
        await guarded_by(self._receiving, self._call.guard(self._flowing.wait()))
        inbound = self._inbound
        assert inbound is not None
        before, began = inbound.bytes, time.monotonic()
        with inbound.waiting_alone():
            await self._receiving
        return pb.Measured(
            prefill_instance=self._candidate.instance,
            kv_tokens=len(self._request.context) - self._skip_blocks * BLOCK_TOKENS,
            kv_bytes=inbound.bytes,
            tail_bytes=inbound.bytes - before,
            tail_seconds=time.monotonic() - began,
        )

    @property
    def frames(self) -> int:
        """Number of frames that were given to the engine."""
        assert self._inbound is not None
        return self._inbound.frames

    @property
    def has_asked(self) -> bool:
        """Whether pages are reserved or waited for."""
        return self._pages.due.is_set()

    def on_slot_read(self, sequence: int) -> None:
        """The engine has read frame ``sequence`` from the slot of the prefill worker."""
        if self._inbound is not None:
            self._inbound.on_slot_read(sequence)

    def on_receive_failed(self, event: m.ReceiveFailed) -> None:
        """The engine here has refused a frame."""
        if self._inbound is not None:
            self._inbound.on_receive_failed(event)

    # ---- pages and KV -----------------------------------------------------------------------

    def _on_started(self, cached_tokens: int) -> None:
        """Reserve pages at once for a short prompt; a long one reports its progress."""
        self._started_s = time.monotonic()
        self._cached_there = min(cached_tokens, len(self._request.context))
        ready = self._context.session.ready
        assert ready is not None
        if reserves_at_start(self._tokens_there, ready.prefill_chunk):
            self._pages.due.set()

    def _on_computed(self, tokens: int) -> None:
        """The prefill worker has computed the first ``tokens`` of the context."""
        elapsed_s = time.monotonic() - self._started_s
        if self._inbound is None or self._pages.due.is_set() or not is_pace_known(elapsed_s):
            return
        ready = self._context.session.ready
        assert ready is not None
        inbound, total = self._inbound, len(self._request.context)
        missing = -(-total // BLOCK_TOKENS) - self._skip_blocks
        delay_s = reservation_delay_s(
            tokens=self._tokens_there,
            computed=min(tokens, total) - self._cached_there,
            elapsed_s=elapsed_s,
            kv_bytes=missing * ready.kv.layers * ready.kv.block_layer_bytes(inbound.codec),
            link_bytes_s=inbound.link_bytes_s,
            reserve_s=min(ready.step_seconds, MAX_RESERVE_S),
        )
        self._pages.set_in(delay_s)

    @property
    def _tokens_there(self) -> int:
        """Number of tokens that the prefill worker has to compute."""
        return len(self._request.context) - self._cached_there

    async def _receive(self) -> None:
        """Find what is cached here, reserve pages once they are due, then receive every frame."""
        self._skip_blocks = await self._look_up() // BLOCK_TOKENS
        end_block = -(-len(self._request.context) // BLOCK_TOKENS)
        inbound = self._call.inbound_transfer(self._handle, self._skip_blocks, end_block)
        self._inbound = inbound
        await self._pages.due.wait()  # at the latest on the first token, which has a deadline
        self._context.session.send(m.Reserve(self._handle))
        try:
            async with asyncio.timeout(PAGES_S):
                await self.pages_reserved.wait()
        except TimeoutError as error:
            raise NoPages(f"no pages free here within {PAGES_S:g} s") from error
        self._flowing.set()
        await inbound.run(FRAME_S)

    def _checked(self, first: pb.PrefillEvent.FirstToken, cached_tokens: int) -> FirstToken:
        """Return the first token if the prefill worker may have drawn it: the peer is not trusted.

        Raises TransferFailed or InvalidRequest."""
        ready = self._context.session.ready
        assert ready is not None
        if first.token >= ready.vocab_size:
            raise TransferFailed(
                f"prefill: received token {first.token} of a vocabulary of {ready.vocab_size}"
            )
        if first.finish not in (pb.FINISH_NONE, pb.FINISH_STOP, pb.FINISH_LENGTH):
            raise TransferFailed(f"prefill: received the finish reason {first.finish}")
        logprobs = logprobs_from_wire(first.logprobs) if first.HasField("logprobs") else None
        if (logprobs is None) != (self._request.sampling.logprobs is None):
            raise TransferFailed("prefill: log-probabilities do not match the request")
        due = self._request.prompt_logprobs_due
        prompt_logprobs = logprobs_list_from_wire(first.prompt_logprobs, due)
        return FirstToken(
            first.token, Finish(first.finish), logprobs, prompt_logprobs, cached_tokens
        )


class _PageTimer:
    """Sets ``due`` when a handover shall reserve its pages; a later call replaces the time."""

    def __init__(self) -> None:
        self.due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def set_in(self, seconds: float) -> None:
        self.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.due.set)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
