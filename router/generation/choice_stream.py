"""One choice's stream: from the tokens of decode workers to the text that its client gets.

    DecodeLink --output--> Submission --> TokenQueue --tokens--> ChoiceStream
        --ChoiceDelta--> GenerationResponse --bytes--> client

``ChoiceStream`` owns the submissions, the retries at other workers, and the timers of a request.
``router/http/response.py`` owns the choices of one HTTP request, and its ``_send_stream``
is the one place where the bytes of a stream are sent to a client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

import msgspec

from protocol.requests import Finish, Request
from protocol.retry_budget import HAND_BACK_LIMIT, RetryBudget
from router.common.errors import ApiError, internal_error, invalid, timed_out, unavailable
from router.common.request_body import ClientDisconnected
from router.fairness.dispatcher import FairDispatcher
from router.generation.choice_text import ChoiceDelta, ChoiceText, OutputOptions
from router.generation.choice_turn import ChoiceTurn, RequestEntry
from router.generation.metrics import ChoiceMetrics, RouterMetrics
from router.generation.output_text import SharedPromptLogprobs
from router.generation.placer import PlacedRequest, Placer
from router.generation.submission import Interruption, Submission, TokenBatch, TokenQueue
from router.generation.token_timer import TokenTimer
from router.placement.admission import AdmissionController
from router.placement.snapshot import RequestOrigin
from router.settings import RouterSettings
from router.tenants.tenant import DEFAULT_TENANT, Tenant
from router.text.vocabulary import Vocabulary
from router.workers.pool import WorkerPool

log = logging.getLogger(__name__)

_RETRY_PAUSE_S = 0.05  # before asking the only worker again, which has just refused
_DEADLINE_MARGIN_S = 0.5
_POLL_S = 0.1  # between two checks whether the client of a waiting request is still there


class GenerationRequest(NamedTuple):
    """One choice to generate, and the limits that its client set."""

    request: Request
    keys: Sequence[bytes]  # of the prompt's full blocks
    arrived: float  # on time.perf_counter
    entry: RequestEntry  # shared by the choices of one HTTP request
    tenant: Tenant = DEFAULT_TENANT
    streamed: bool = True  # to a client, who may be slow
    session: bytes = b""  # digest of the client's session key; empty: it gave none


class RoutingServices(NamedTuple):
    """Parts of the router that all choices use."""

    pool: WorkerPool
    placer: Placer
    admission: AdmissionController
    dispatcher: FairDispatcher
    settings: RouterSettings
    metrics: RouterMetrics
    vocabulary: Vocabulary


class ChoiceStream:
    """One choice of a response. Created by ``accept_request``, closed by ``GenerationResponse``.

    created --start()--> waiting for its turn --> refused
                            |
                         submitted --tokens--> streaming --finish, stop string--> finished
                            |  ^                   |
                            |  +--- resubmitted <--+  link lost, or an error that another worker
                            |  |                   |  may not have: at most as many deaths in
                            |  |                   |  a short time as DEATH_LIMIT says
                            |  +--- resubmitted <--+  handed back by a worker that drains or waits
                            |                         for an engine, or lost after this router had
                            |                         stood still: this is no death
                            +--> failed: disconnect, deadline, client too slow, fatal error
    any state --close()--> closed: work cancelled at the worker, metrics recorded

    A resubmitted request carries the tokens so far. The numerics contract makes another worker
    continue with the tokens that the first one would have produced.
    """

    def __init__(
        self,
        services: RoutingServices,
        index: int,
        generation: GenerationRequest,
        output: OutputOptions,
        shared_prompt_logprobs: SharedPromptLogprobs,
    ) -> None:
        request = generation.request
        self.index = index
        self.prompt = request.prompt
        self.submissions: list[Submission] = []  # the last one may still run
        self.text = ChoiceText(index, request, output, services.vocabulary, shared_prompt_logprobs)
        self._services = services
        self._generation = generation
        self._request = request
        model = services.pool.model
        self._fingerprint = model.fingerprint if model else ""
        buffer = services.settings.client_buffer_tokens
        self._queue = TokenQueue(buffer if generation.streamed else request.sampling.max_tokens)
        self._received: list[int] = []  # output tokens of all submissions
        self._cached_tokens = 0  # ``cached_tokens`` as of the first token
        self._hand_backs = RetryBudget(HAND_BACK_LIMIT)
        self._failed_instances: set[str] = set()
        self._later: TokenBatch | None = None  # interruption that came together with tokens
        self._leave: Callable[[], None] | None = None
        self._refusal: ApiError | None = None  # with Interruption.REFUSED
        self._origin = RequestOrigin(generation.tenant.name, generation.session)
        self._turn = ChoiceTurn(
            *(services.dispatcher, services.placer, request, generation.keys, generation.tenant),
            *(self._origin, self._submit_first, self._on_refused),
        )
        self._older_s = 0.0  # than it is, for workers
        self._metrics = ChoiceMetrics(services.metrics, generation.arrived, len(request.prompt))
        settings = services.settings
        self._timer = TokenTimer(
            *(generation.arrived, settings.first_token_timeout_s, settings.next_token_timeout_s),
            *(lambda: self._metrics.last_token_at, lambda: self._queue.has_tokens),
            lambda reason: self._interrupt(Interruption.TIMEOUT, reason),
        )

    @property
    def cached_tokens(self) -> int:
        return min(self._queue.cached_tokens or 0, len(self.prompt))

    @property
    def token_times(self) -> tuple[float, float] | None:
        """When the first and the last tokens came (time.perf_counter); None: there were none."""
        first = self._metrics.first_token_at
        return None if first is None else (first, self._metrics.last_token_at)

    @property
    def request_id(self) -> str:
        """Return the id under which workers know the choice; each submission adds its number."""
        return self._request.id

    def reserve(self) -> None:
        """Take a place among the requests in the router. Raises ApiError (429) where none is
        left."""
        if self._leave is None:
            self._leave = self._services.admission.enter(self._generation.tenant.name)

    def start(self) -> None:
        """Submit the request, or let it wait for its turn; do nothing once the client has hung up.
        Raises ApiError: 503 without a decode worker, 429 when there is too much work already."""
        if self._queue.failed:  # it hung up while other choices of its request were started
            return
        self.reserve()
        self._timer.start()
        self._turn.enter(self._generation.arrived, self._generation.entry)

    async def deltas(self) -> AsyncIterator[ChoiceDelta]:
        """Yield text as it comes; the last delta has a finish reason.

        Raises ApiError or ClientDisconnected.
        """
        finish = None
        while finish is None:
            delta = await self.next_delta()
            finish = delta.finish
            yield delta

    async def next_delta(self) -> ChoiceDelta:
        """Return the text that comes next, as ``deltas`` does. Not to be called after the last."""
        batch = await self._next_tokens()
        if not self.text.has_begun:
            await self.text.begin(self._queue.prompt_logprobs)
            self._cached_tokens = self.cached_tokens
        delta = self.text.next_delta(batch)
        self._metrics.record_tokens(len(delta.ids), self._cached_tokens)
        if delta.finish:
            self._complete()
        return delta

    def disconnect(self) -> None:
        """Stop the work at once: the client has hung up."""
        self._interrupt(Interruption.DISCONNECTED, "the client has disconnected")

    def close(self, status: str) -> None:
        """Release the work in whatever state it is, and record ``status`` in metrics. Call once."""
        self._stop_work()
        self._metrics.record_end(status, self.submissions)

    # ---- Tokens from workers ----------------------------------------------------------------

    async def _next_tokens(self) -> TokenBatch:
        """Return the next tokens, from another worker if the present one fails."""
        while True:
            batch = self._later or await self._queue.take()
            self._later = None
            if batch.tokens or batch.finish:
                return self._received_batch(batch)
            await self._recover(batch)

    def _received_batch(self, batch: TokenBatch) -> TokenBatch:
        if not self._received:
            self._timer.first_token_came()
            self._turn.charge.on_first_token(len(self.prompt) - self.cached_tokens)
        self.submissions[-1].record_tokens()
        left = self._request.sampling.max_tokens - len(self._received)
        received = batch
        if len(batch.tokens) >= left:  # finished, whether or not the worker has sent that yet
            received = batch._replace(
                tokens=batch.tokens[:left],
                logprobs=batch.logprobs[:left],
                finish=batch.finish or Finish.LENGTH,
            )
        self._received.extend(received.tokens)
        if received.finish:
            self.submissions[-1].record_finish()
        elif batch.interruption:
            self._later = batch._replace(tokens=[], logprobs=[])
        return received

    async def _recover(self, batch: TokenBatch) -> None:
        """Submit the request to another worker after an interruption, or raise."""
        assert batch.interruption is not None
        if not batch.interruption.can_resubmit:
            raise self._refusal or _final_error(batch)
        is_death, now = batch.interruption.is_death, time.monotonic()
        failed = self.submissions[-1].placed.link
        if is_death or failed.ready:  # a worker that drained may come back unharmed
            self._failed_instances.add(failed.record.instance)
        self._release_submission()
        count = len(self.submissions)
        log.warning("request %s, attempt %d: %s", self._request.id, count, batch.reason)
        budget = self._queue.deaths if is_death else self._hand_backs
        budget.record(now)
        if self._queue.deaths.used_up(now) or budget.used_up(now):
            raise unavailable(f"failed at {count} attempts, the last time with: {batch.reason}")
        await self._resubmit()

    async def _resubmit(self) -> None:
        services, keys = self._services, self._generation.keys
        loop = asyncio.get_running_loop()
        deadline = loop.time() + services.settings.resubmit_wait_s
        while not self._queue.failed:
            await self._pause_before_retry()
            resumed = self._request.resumed(self._received)
            placed = services.placer.place(resumed, keys, self._failed_instances, self._origin)
            if placed is not None and not self._queue.failed:
                model = services.pool.model
                if model is None or model.fingerprint != self._fingerprint:
                    raise unavailable(
                        "the decode worker was lost, and the model has changed since then"
                    )
                return self._submit(placed)
            if loop.time() >= deadline:
                raise unavailable(
                    "the decode worker was lost, and no other one was available in time"
                )
            await services.pool.wait_change(_POLL_S)
        return None

    async def _pause_before_retry(self) -> None:
        """Wait when only workers that have just refused are attached."""
        links = self._services.pool.links
        attached = {instance for instance, link in links.items() if link.ready}
        if attached and attached <= self._failed_instances:
            await asyncio.sleep(_RETRY_PAUSE_S * len(self.submissions))

    def _submit_first(self, placed: PlacedRequest, older_s: float) -> None:
        self._older_s = older_s
        self._submit(placed)

    def _submit(self, placed: PlacedRequest) -> None:
        # Each submission has its own id: the same worker may still be forgetting the last one.
        name = f"{self._request.id}.{len(self.submissions) + 1}"
        waited_s = self._older_s  # at decode workers: an attempt keeps the place of the first one
        if self.submissions:
            waited_s += time.perf_counter() - self.submissions[0].submitted
        resumed = self._request.resumed(self._received, waited_s)
        request = msgspec.structs.replace(
            resumed,
            id=name,
            # Somewhat longer than here: the client gets the error of this router's timer.
            first_token_s=max(self._timer.left_s, 0.0) + _DEADLINE_MARGIN_S,
            token_timeout_s=self._services.settings.next_token_timeout_s + _DEADLINE_MARGIN_S,
        )
        self.submissions.append(Submission(self._services.placer, placed, request, self._queue))

    def _on_refused(self, error: ApiError) -> None:
        self._refusal = error
        self._interrupt(Interruption.REFUSED, error.message)

    def _complete(self) -> None:
        """Stop the work, which goes on after a stop string, and learn from the length."""
        self._stop_work()
        self._metrics.record_completion()
        limit = self._request.sampling.max_tokens
        outputs = self._services.placer.estimates.outputs
        outputs.record(self._origin.tenant, limit, len(self._received))

    def _interrupt(self, cause: Interruption, reason: str) -> None:
        self._queue.interrupt(cause, reason)
        self._turn.leave()
        self._release_submission()

    def _release_submission(self) -> None:
        if self.submissions:
            self.submissions[-1].release()

    def _stop_work(self) -> None:
        """Cancel what still runs and leave admission. May be called again."""
        self._timer.cancel()
        self._turn.leave()
        self._release_submission()
        self._turn.charge.on_end(len(self._received))
        if self._leave is not None:
            self._leave()


def _final_error(batch: TokenBatch) -> ApiError | ClientDisconnected:
    if batch.invalid is not None:
        return invalid(batch.reason, batch.invalid.param, batch.invalid.code)
    if batch.interruption is Interruption.DISCONNECTED:
        return ClientDisconnected()
    if batch.interruption is Interruption.TIMEOUT:
        return timed_out(batch.reason)
    if batch.interruption is Interruption.OVERFLOW:
        return internal_error(batch.reason, "client_too_slow")
    return internal_error(batch.reason, "worker_error")
