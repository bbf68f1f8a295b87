"""One attempt to have a prompt prefilled elsewhere and its KV brought here.

    Prefill.Run --accepted--> --started--> reserve pages, open PullKV
       --first_token--> to the client at once        frames --> slots --> engine
       last frame in and first token known --> Join

The decode worker owns both RPCs. An attempt ends by joining the batch, by finishing (the first
token was the last), or by TransferFailed; its hold on the prefill worker's pages ends with it.
Whatever the prefill worker refuses, this worker can still compute itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from engine import messages as m
from kvtransfer.control import Control, beside
from kvtransfer.links import Links
from kvtransfer.prefillers import PrefillCall
from protocol import wire_pb2 as pb
from protocol.blocks import BLOCK_TOKENS
from protocol.errors import InvalidRequest, TransferFailed
from protocol.logprobs import Logprobs, all_from_wire, logprobs_from_wire
from protocol.request import Finish, Request

PREFILL_S = 60.0
"""From accepted to first token, queueing included; well within the router's own deadline."""

FRAME_S = 5.0
"""Progress deadline of the KV once the prompt is computed: the longest gap between frames."""


class First(NamedTuple):
    """The first token, as the prefill worker drew it."""

    token: int
    finish: Finish
    logprobs: Logprobs | None
    prompt_logprobs: list[Logprobs]


@dataclass(frozen=True)
class Told:
    """Whom an attempt tells of its progress."""

    first: Callable[[First, int], None]  # with the cached prompt tokens
    mark: Callable[[str], None]  # an event of the timeline
    measured: Callable[[pb.Measured], None]  # what it took, once all KV is here


class Handover:
    """One attempt for the sequence ``handle``, of which ``cached_tokens`` are here already."""

    def __init__(
        self, links: Links, handle: int, request: Request, cached_tokens: int, told: Told
    ) -> None:
        self._links = links
        self._handle = handle
        self._request = request
        self._cached = cached_tokens
        self._told = told
        self._prefill = ""  # instance
        self._control = Control(links, told.mark)
        self._skip = cached_tokens // BLOCK_TOKENS
        blocks = -(-len(request.context) // BLOCK_TOKENS)
        self.incoming = self._control.incoming(handle, self._skip, blocks)

    async def run(self, call: PrefillCall, candidate: pb.PrefillCandidate) -> None:
        """Bring the context's KV in over ``call`` (just opened) and join. Raises
        TransferFailed."""
        self._prefill = candidate.instance
        fetch = candidate.fetch if candidate.HasField("fetch") else None
        try:
            async with self._control.over(call):
                await self._control.open(
                    call, self._request, candidate.instance, self._skip, fetch=fetch
                )
                self._told.mark("prefill_queued")
                await self._carry(call, candidate.kv_endpoint)
        except TransferFailed:
            self.incoming.broke()
            raise

    async def _carry(self, call: PrefillCall, kv_endpoint: str) -> None:
        """From accepted to joined, or to the end."""
        receiving: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(PREFILL_S):
                cached = (await self._control.next("started")).started.cached_tokens
                self._told.mark("prefill_started")
                receiving = asyncio.create_task(self._receive(kv_endpoint))
                event = await beside(self._control.next("first_token"), receiving)
            try:
                first = self._checked(event.first_token)
            except InvalidRequest as error:
                raise TransferFailed(f"prefill: {error}") from error
            self._told.mark("first_token")
            if first.finish is Finish.NONE:
                self._told.first(first, cached)
                before, began = self.incoming.bytes, time.monotonic()
                watching = self._control.watch(receiving, self.incoming, FRAME_S)
                with self._links.traffic.tails.waiting(lambda: self.incoming.bytes):
                    await beside(watching, receiving)
                self._told.mark("kv_ready")
                self._account(before, time.monotonic() - began)
                self._links.session.send(m.Join(self._handle, first.token))
        finally:
            call.cancel()  # first of all: P's pages are free whatever the rest takes
            if receiving is not None:
                receiving.cancel()
                await asyncio.wait([receiving])
        if first.finish is not Finish.NONE:
            self._told.first(first, cached)

    def _account(self, before: int, tail_s: float) -> None:
        """``before``: bytes that had come when the first token did, ``tail_s`` ago."""
        came = self.incoming.bytes
        measured = pb.Measured(prefill_instance=self._prefill, kv_bytes=came)
        measured.kv_tokens = len(self._request.context) - self._skip * BLOCK_TOKENS
        measured.tail_bytes, measured.tail_seconds = came - before, tail_s
        self._told.measured(measured)

    async def _receive(self, kv_endpoint: str) -> None:
        await self.incoming.reserve()
        await self.incoming.run(kv_endpoint)

    def _checked(self, first: pb.PrefillEvent.FirstToken) -> First:
        """The first token as P says it, if it can be one."""
        ready = self._links.session.ready
        assert ready is not None
        if first.token >= ready.vocab_size:
            raise TransferFailed(f"prefill: token {first.token} of {ready.vocab_size} came")
        if first.finish not in (pb.FINISH_NONE, pb.FINISH_STOP, pb.FINISH_LENGTH):
            raise TransferFailed(f"prefill: finish {first.finish} came")
        logprobs = logprobs_from_wire(first.logprobs) if first.HasField("logprobs") else None
        if (logprobs is None) != (self._request.sampling.logprobs is None):
            raise TransferFailed("prefill: log-probabilities came or not, unlike asked for")
        prompt = all_from_wire(first.prompt_logprobs, self._request.prompt_logprobs_due)
        return First(first.token, Finish(first.finish), logprobs, prompt)
