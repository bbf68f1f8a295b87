"""One request on its decode worker, from Submit to its last token.

    queued --+--> prefilling here -------------------------------+
      ^      |                                                   v
      |      +--> prefill elsewhere ------> receiving KV ---> decoding --> finished
      |                 |                       |                |
      +---- retried <---+-----------------------+----------------+
                            transfer failed, or its KV was bad

    any state --engine died, worker drains, engine busy--> handed back
    any state --client hung up, request refused, expired, too many deaths--> finished

    queued             waits for an engine, and fetches blocks that a peer has cached; then
                       ``should_prefill_locally`` decides
    prefilling here    Generate was sent to the engine
    prefill elsewhere  Prefill.Run is open (handover.py), and the engine looks up what is cached
                       here; ``should_prefill_locally`` decides once more then
    receiving KV       the first token is with the client, and the rest of the KV under way
    decoding           Join was sent, or the prefill here has drawn the first token
    retried            a new sequence starts from the tokens already sent, on the same prefill
                       worker while that lives, because it has the prompt cached; after
                       MAX_TRANSFERS failures the prompt is prefilled here
    handed back        the router gives the request to another worker, with the tokens already sent

Tokens that were sent stay valid, because sampling is a function of the position. Every sequence of
the request says how long the request has waited (``Request.waited_s``), so that a retry keeps its
place in the queues of both workers.

Pages: the engine holds those of the sequence ``_handle`` until ``_drop_sequence``. When a client
hangs up, ``cancel`` does both: Drop frees the pages here at the engine's next step boundary, and
cancelling the task ``_placing`` ends Prefill.Run, which frees those on the prefill worker; a fetch
from a peer ends its import. In an engine Drop leads to ``Engine.drop``, ``Scheduler.finish``,
``Sequence.release`` and ``BlockManager.release``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from decode_worker.candidates import PrefillCandidates
from decode_worker.expiry import RequestExpiry
from decode_worker.handover import FirstToken, Handover
from engine.ipc import messages as m
from engine.process.client import EngineClient
from kvtransfer.peer_fetch import PeerFetch
from kvtransfer.receiver_context import KVReceiver, ReceiverContext
from protocol.errors import InvalidRequest, PeerLost, TransferFailed, Unavailable
from protocol.requests import Finish, Logprobs, Request, logprobs_to_wire
from protocol.retry_budget import DEATH_LIMIT, RetryBudget
from protocol.wire import wire_pb2 as pb

log = logging.getLogger("baton.decode")

ENGINE_WAIT_S = 5.0
"""How long a request waits for an engine that is being replaced, before it is handed back. One
that another worker can take does not wait."""

LOOKUP_S = 30.0
"""How long the engine may take to look up a prefix; it does so at its next step boundary."""

_AFTER_FIRST_TOKEN = {"kv_ready", "decode_started", "finished"}
"""Events that are recorded after the first token."""


class EnoughCached(Exception):
    """This worker has cached so much of the prompt that it computes the rest itself."""


def should_prefill_locally(
    context_tokens: int, cached_tokens: int, has_prefill_worker: bool, local_prefill_tokens: int
) -> bool:
    """Return whether the decode worker computes the missing tokens of the context itself.

    It does when there is no prefill worker (left), and when at most ``local_prefill_tokens`` are
    missing, because a handover would take longer than computing them. The router sends that limit
    with the request (``Placer.submit_message``); where D alone is the best placement, it names no
    prefill worker."""
    return not has_prefill_worker or context_tokens - cached_tokens <= local_prefill_tokens


def invalid_request_output(request_id: str, error: InvalidRequest) -> pb.Output:
    """Return the last output of a request that no worker can take."""
    invalid = pb.Invalid(param=error.param or "", code=error.code or "")
    return pb.Output(id=request_id, finish=pb.FINISH_ERROR, error=str(error), invalid=invalid)


class DecodeRequest:
    """One request of one router. ``DecodeService`` creates it for a Submit; it calls ``on_end``
    when it has finished or was handed back.

    It is the SequenceListener of its sequence in the engine, of which it has one at a time. Events
    of a dropped sequence no longer arrive, because its handle is detached."""

    def __init__(
        self,
        request: Request,
        submit: pb.Submit,
        engine: EngineClient,
        receiver: KVReceiver,
        emit: Callable[[pb.Output], None],
        on_end: Callable[[DecodeRequest], None],
    ) -> None:
        self.request = request
        self._candidates = PrefillCandidates(submit.prefill)
        self._fetch_source = submit.fetch if submit.HasField("fetch") else None
        self._began = time.monotonic()
        self._deaths = RetryBudget(DEATH_LIMIT, submit.deaths, self._began)
        self._engine = engine
        self._receiver = receiver
        self._uncached_tokens = submit.uncached_tokens
        self._local_prefill_tokens = submit.local_prefill_tokens  # unset: 0
        self._engine_wait_s = 0.0 if submit.has_alternative else ENGINE_WAIT_S
        self._emit = emit
        self._on_end = on_end
        self._ended = False
        # Output so far.
        self._emitted: list[int] = list(request.emitted)
        self._cached_tokens = 0
        self._prompt_logprobs: list[pb.Logprobs] = []  # until the next token
        self._measured: pb.Measured | None = None
        self._timeline: dict[str, float] = {}  # event -> seconds since ``_began``
        # The current attempt to place the sequence in the decode batch.
        self._context: ReceiverContext | None = None
        self._handle = -1  # of the sequence in the engine; -1: none
        self._candidate: pb.PrefillCandidate | None = None
        self._unreserved = len(request.context)  # tokens that have no pages here yet
        self._prefix_found: asyncio.Future[int] | None = None
        self._handover: Handover | None = None
        self._expiry = RequestExpiry(request, self._expire, lambda: len(self._emitted))
        self._placing = self._start_placing()

    # ---- finished, handed back, retried -----------------------------------------------------

    def cancel(self) -> None:
        """End without an output, because the client or the router is gone; see "Pages" above."""
        if not self._ended:
            self._end()

    def hand_back(self, why: str) -> None:
        """Give the request back unharmed: the router goes on elsewhere with the tokens sent."""
        self._fail(why, retryable=True, moved=True)

    def _expire(self, why: str) -> None:
        """End because no token has come for too long."""
        self._fail(why, retryable=False, expired=True)

    def _fail(
        self, why: str, *, retryable: bool, moved: bool = False, expired: bool = False
    ) -> None:
        if not self._ended:
            output = pb.Output(id=self.request.id, finish=pb.FINISH_ERROR, error=why)
            output.retryable, output.moved, output.expired = retryable, moved, expired
            output.timeline.extend(self._timeline_to_wire())
            self._emit(output)
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._expiry.cancel()
        self._placing.cancel()
        self._drop_sequence()
        self._on_end(self)

    def _drop_sequence(self) -> None:
        """Forget the sequence in the engine, which frees its pages at the next step boundary."""
        if self._handle >= 0:
            assert self._context is not None
            self._context.session.detach(self._handle)
            self._context.session.send(m.Drop(self._handle))
            self._handle = -1

    def _drop_attempt(self, error: TransferFailed) -> None:
        """Drop the sequence, and the prefill worker that was asked if it is of no further use."""
        log.warning("request %s: %s", self.request.id, error)
        self._candidates.failed(self._candidate, error)
        self._candidate = None
        self._drop_sequence()

    # ---- queued: placing the sequence in the decode batch -----------------------------------

    def _start_placing(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._place(), name=f"place-{self.request.id}")

    async def _place(self) -> None:
        """Try until the sequence is in the batch or the request has ended."""
        try:
            await self._engine.session(self._engine_wait_s)
            await self._fetch_from_peer()
            while not await self._try_to_place():
                pass
        except Unavailable as error:
            self.hand_back(str(error))
        except Exception:
            log.exception("request %s: a bug", self.request.id)
            self._fail("internal error", retryable=False)

    async def _fetch_from_peer(self) -> None:
        """Fetch what another worker has cached, where the router names one; tried only once."""
        source, self._fetch_source = self._fetch_source, None
        request = self._resumed()
        if source is not None and not request.prompt_logprobs_due:
            handle = self._engine.handle()
            await PeerFetch(self._receiver.context(), handle, request, source, self._mark).run()

    async def _try_to_place(self) -> bool:
        """Return whether the sequence is in the batch, or the request has ended."""
        await self._engine.session(self._engine_wait_s)
        context = self._context = self._receiver.context()
        candidate = self._candidate = self._candidates.choose(
            lambda c: (
                not context.channels.is_suspected(c.endpoint) and context.links.usable(c.instance)
            )
        )
        request = self._resumed()
        self._unreserved = len(request.context)
        try:
            if (
                candidate is None
                or self._should_prefill_locally(request, 0)
                or not await self._prefill_elsewhere(context, request, candidate)
            ):
                self._prefill_here(context, self._resumed())
        except TransferFailed as error:
            self._drop_attempt(error)
            if isinstance(error, PeerLost) and candidate is not None:
                self._count_death(context, error, candidate.endpoint)
            return self._ended  # by one death too many
        return True

    def _resumed(self) -> Request:
        """Return the request as it is now: with the tokens already sent, its age, and what is left
        of its deadlines."""
        since_s = time.monotonic() - self._began
        resumed = self.request.resumed(self._emitted, self.request.waited_s + since_s)
        has_sent = len(self._emitted) > len(self.request.emitted)
        return resumed if has_sent else resumed.after(since_s)

    @property
    def promised_tokens(self) -> int:
        """Number of tokens that will need pages of this worker, and have none yet."""
        return 0 if self._ended else self._unreserved

    @property
    def awaited_tokens(self) -> int:
        """Number of ``promised_tokens`` that have been asked for."""
        handover = self._handover
        return 0 if handover is not None and not handover.has_asked else self.promised_tokens

    def _should_prefill_locally(self, request: Request, cached_tokens: int) -> bool:
        """Decide with 0 before the look-up, which a short context does not need, and after it."""
        has_worker, limit = self._candidate is not None, self._local_prefill_tokens
        return should_prefill_locally(len(request.context), cached_tokens, has_worker, limit)

    def _count_death(self, context: ReceiverContext, error: PeerLost, endpoint: str) -> None:
        """Record that the prefill worker died or hangs; this request may be the cause."""
        context.channels.suspect(endpoint)
        if error.at_work:
            now = time.monotonic()
            self._deaths.record(now)
            self._emit(pb.Output(id=self.request.id, deaths=1))
            if self._deaths.used_up(now):
                why = f"{self._deaths.count(now)} workers died while they served this request"
                self._fail(why, retryable=False)

    def _new_sequence(self, context: ReceiverContext) -> int:
        self._handle = self._engine.handle()
        context.session.attach(self._handle, self)
        return self._handle

    def _prefill_here(self, context: ReceiverContext, request: Request) -> None:
        self._drop_sequence()  # one that was only looked up
        self._handover = None
        self._mark("prefill_queued")
        handle = self._new_sequence(context)
        context.session.send_prompt(m.Generate(handle, request, self._uncached_tokens))

    async def _prefill_elsewhere(
        self, context: ReceiverContext, request: Request, candidate: pb.PrefillCandidate
    ) -> bool:
        """prefill elsewhere -> receiving KV -> decoding, or finished with the first token.

        Returns False if so much is cached here that the prompt is prefilled here after all. Raises
        TransferFailed."""
        stream = context.channels.open_call(candidate.endpoint)
        try:
            handle = self._new_sequence(context)
            found = self._prefix_found = asyncio.get_running_loop().create_future()
            context.session.send(m.Receive(handle, request))
            self._handover = handover = Handover(
                *(context, stream, candidate, handle, request),
                *(lambda: self._look_up_prefix(request, found), self._mark),
            )
            async with handover.open():
                first = await handover.first_token()
                self._mark("first_token")
                if first.finish is Finish.NONE:
                    self._send_first_token(first)
                    self._measured = await handover.remaining_kv()
                    self._mark("kv_ready")
                    context.session.send(m.Join(handle, first.token, handover.frames))
            if first.finish is not Finish.NONE:
                self._send_first_token(first)  # it is the last one, too
            return True
        except EnoughCached:
            return False
        finally:
            stream.cancel()

    async def _look_up_prefix(self, request: Request, found: asyncio.Future[int]) -> int:
        """Return how many leading tokens of the context are cached here. Raises EnoughCached, and
        Unavailable when the engine does not answer."""
        try:
            async with asyncio.timeout(LOOKUP_S):
                cached = await found
        except TimeoutError as error:
            raise Unavailable("the engine does not answer") from error
        self._unreserved = len(request.context) - cached
        if self._should_prefill_locally(request, cached):
            raise EnoughCached
        return cached

    def _send_first_token(self, first: FirstToken) -> None:
        self._set_cached_tokens(first.cached_tokens)
        self._prompt_logprobs = [logprobs_to_wire(report) for report in first.prompt_logprobs]
        self.on_token(first.token, first.finish, first.logprobs)

    # ---- events of the engine ---------------------------------------------------------------

    def on_event(self, event: m.Event) -> None:
        if isinstance(event, m.Started):
            self._unreserved = 0
            self._mark("prefill_started")
            self._set_cached_tokens(event.cached_tokens)
        elif isinstance(event, m.PrefixFound):
            if self._prefix_found is not None and not self._prefix_found.done():
                self._prefix_found.set_result(event.cached_tokens)
        elif isinstance(event, m.Reserved) and self._handover is not None:
            self._unreserved = 0
            self._handover.pages_reserved.set()
        elif isinstance(event, m.SlotRead) and self._handover is not None:
            self._handover.on_slot_read(event.sequence)
        elif isinstance(event, m.Joined):
            self._mark("decode_started")
        elif isinstance(event, m.ReceiveFailed):  # also after Join, which follows the last frames
            if self._handover is not None:
                self._handover.on_receive_failed(event)
            self._retry(TransferFailed(event.why))
        elif isinstance(event, m.Expired):
            self._expire("its deadline passed before it was complete")
        elif isinstance(event, m.RequestRefused) and event.busy:
            self.hand_back(event.why)
        elif isinstance(event, m.RequestRefused):
            self._refuse(InvalidRequest(event.why, event.param or None, event.code or None))
        elif isinstance(event, m.PromptLogprobs):
            self._prompt_logprobs = [logprobs_to_wire(report) for report in event.logprobs]

    def on_lost(self) -> None:
        """Hand the request back: another worker is quicker than the next engine here can load."""
        self._handle = -1
        self._fail("the engine died while it served this request", retryable=True)

    def _retry(self, error: TransferFailed) -> None:
        """Start again from the tokens already sent, because the KV that came is of no use."""
        if not self._ended:
            self._drop_attempt(error)
            self._placing.cancel()
            self._placing = self._start_placing()

    def _refuse(self, error: InvalidRequest) -> None:
        if not self._ended:
            self._emit(invalid_request_output(self.request.id, error))
            self._end()

    # ---- output -----------------------------------------------------------------------------

    def on_token(self, token: int, finish: Finish, logprobs: Logprobs | None) -> None:
        """Send a token to the router; with ``finish`` the request ends."""
        if self._ended:
            return
        is_first = len(self._emitted) == len(self.request.emitted)
        self._emitted.append(token)
        if is_first:
            self._expiry.first_token_came()
            self._mark("first_token")
        output = pb.Output(id=self.request.id, tokens=(token,), cached_tokens=self._cached_tokens)
        if logprobs is not None:
            output.logprobs.append(logprobs_to_wire(logprobs))
        if finish is not Finish.NONE:
            self._mark("finished")
            output.finish = int(finish)  # type: ignore[assignment]
            if self._measured is not None:
                output.measured.CopyFrom(self._measured)
        if is_first or finish is not Finish.NONE:
            output.timeline.extend(self._timeline_to_wire())
        output.prompt_logprobs.extend(self._prompt_logprobs)
        self._prompt_logprobs = []
        self._emit(output)
        if finish is not Finish.NONE:
            self._end()

    def _set_cached_tokens(self, tokens: int) -> None:
        """Record the cached prompt tokens, unless a retry finds what it has computed itself."""
        if len(self._emitted) == len(self.request.emitted):
            self._cached_tokens = min(tokens, len(self.request.prompt))

    def _mark(self, event: str) -> None:
        """Record the time of an event. Those of the prompt count once, not again in a retry."""
        if "first_token" not in self._timeline or event in _AFTER_FIRST_TOKEN:
            self._timeline[event] = time.monotonic() - self._began

    def _timeline_to_wire(self) -> list[pb.Mark]:
        return [pb.Mark(event=event, seconds=s) for event, s in self._timeline.items()]
