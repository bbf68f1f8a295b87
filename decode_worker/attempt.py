"""One attempt of a job: a sequence in one engine session, placed here or handed over.

    lookup (Receive --Found-->) --> few tokens missing, or no prefill worker: Generate
                                \\-> else: Handover (... Join)

Late events of an attempt that was given up reach nobody: its handle is detached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from decode_worker.handover import First, Handover, Told
from decode_worker.placement import prefill_here
from engine import messages as m
from kvtransfer.links import Links
from kvtransfer.prefillers import PrefillCall
from protocol import wire_pb2 as pb
from protocol.errors import InvalidRequest, TransferFailed, Unavailable
from protocol.logprobs import Logprobs
from protocol.request import Finish, Request

LOOKUP_S = 30.0
"""How long the engine may take to answer; it does so at its next step boundary."""


class Owner(Protocol):
    """The job, as its attempt sees it."""

    def token(self, token: int, finish: Finish, logprobs: Logprobs | None) -> None:
        """The next token."""

    def cached(self, tokens: int) -> None:
        """Prompt tokens that no one had to compute."""

    def mark(self, event: str) -> None:
        """An event of the timeline."""

    def measured(self, measured: pb.Measured) -> None:
        """What the hand-over took."""

    def prompt_logprobs(self, logprobs: list[Logprobs]) -> None:
        """Those of the prompt; the first token follows."""

    def refused(self, error: InvalidRequest) -> None:
        """The engine will never take this request."""

    def busy(self, why: str) -> None:
        """The engine has no time for this request; another may."""

    def lost(self) -> None:
        """The engine is gone."""

    def spoiled(self, why: str) -> None:
        """The KV that came was bad, and the sequence is gone: place it anew, elsewhere."""


class Attempt:
    """A Listener of its sequence. ``give_up`` frees the sequence, wherever it is."""

    def __init__(self, owner: Owner, links: Links, handle: Callable[[], int]) -> None:
        self._owner = owner
        self._links = links
        self._new_handle = handle
        self._handle = -1
        self._found: asyncio.Future[int] | None = None
        self._handover: Handover | None = None
        self._breaking: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._joined = False

    async def place(
        self, request: Request, candidate: pb.PrefillCandidate | None, local_prefill_tokens: int
    ) -> None:
        """Until the sequence decodes here, or has ended. Raises TransferFailed."""
        context = len(request.context)
        others = candidate is not None
        if not prefill_here(context, 0, others, local_prefill_tokens):
            assert candidate is not None
            call = self._links.prefillers.run(candidate.endpoint)  # opens while we look up
            try:
                cached = await self._look_up(request)
                if not prefill_here(context, cached, others, local_prefill_tokens):
                    return await self._hand_over(request, cached, call, candidate)
            finally:
                call.cancel()
            self.give_up()
        self._owner.mark("prefill_queued")
        self._seat()
        self._links.session.send(m.Generate(self._handle, request))
        return None

    def give_up(self) -> None:
        """Forget the sequence; its pages are free at the engine's next step boundary."""
        if self._handle >= 0:
            self._links.session.detach(self._handle)
            self._links.session.send(m.Drop(self._handle))
            self._handle = -1

    def _seat(self) -> None:
        self._handle = self._new_handle()
        self._links.session.attach(self._handle, self)

    async def _look_up(self, request: Request) -> int:
        """Tokens of the context that are cached here."""
        self._seat()
        self._found = asyncio.get_running_loop().create_future()
        self._links.session.send(m.Receive(self._handle, request))
        try:
            async with asyncio.timeout(LOOKUP_S):
                return await self._found
        except TimeoutError as error:
            raise Unavailable("the engine does not answer") from error

    async def _hand_over(
        self, request: Request, cached: int, call: PrefillCall, candidate: pb.PrefillCandidate
    ) -> None:
        told = Told(self._first, self._owner.mark, self._owner.measured)
        self._handover = Handover(self._links, self._handle, request, cached, told)
        running = asyncio.ensure_future(self._handover.run(call, candidate))
        try:
            await asyncio.wait([running, self._breaking], return_when=asyncio.FIRST_COMPLETED)
            if self._breaking.done():
                await self._breaking  # raises
            await running
            self._joined = True
        finally:
            running.cancel()
            await asyncio.wait([running])

    def _first(self, first: First, cached: int) -> None:
        self._owner.cached(cached)
        self._owner.prompt_logprobs(first.prompt_logprobs)
        self._owner.token(first.token, first.finish, first.logprobs)

    # ---- what the engine says ---------------------------------------------------------------

    def on_token(self, token: int, finish: Finish, logprobs: Logprobs | None) -> None:
        self._owner.token(token, finish, logprobs)

    def on_event(self, event: m.Event) -> None:
        if isinstance(event, m.Started):
            self._owner.mark("prefill_started")
            self._owner.cached(event.cached_tokens)
        elif isinstance(event, m.Found) and self._found is not None:
            if not self._found.done():
                self._found.set_result(event.cached_tokens)
        elif isinstance(event, m.Joined):
            self._owner.mark("decode_started")
        elif isinstance(event, m.Reserved) and self._handover is not None:
            self._handover.incoming.on_reserved()
        elif isinstance(event, m.Broken) and self._joined:
            self._owner.spoiled(event.why)  # the last frames were given together with Join
        elif isinstance(event, m.Broken):
            self._break(TransferFailed(event.why))
        elif isinstance(event, m.Refused) and event.busy:
            self._owner.busy(event.why)
        elif isinstance(event, m.Refused):
            error = InvalidRequest(event.why, event.param or None, event.code or None)
            self._owner.refused(error)
        elif isinstance(event, m.PromptLogprobs):
            self._owner.prompt_logprobs(event.logprobs)

    def _break(self, error: Exception) -> None:
        if not self._breaking.done():
            self._breaking.set_exception(error)

    def on_lost(self) -> None:
        self._handle = -1
        self._owner.lost()
