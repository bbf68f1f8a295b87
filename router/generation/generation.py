"""One request across decode workers: submitted, perhaps resubmitted, finished or given up.

    start -> submitted --tokens--> ... --finish--> done
                 |  stream broken, or an error that another worker may not have
                 +--> resubmitted with the tokens so far, until three workers died under it
                 |  handed back by a worker that goes, or waits for an engine
                 +--> resubmitted likewise; this is no death
                 |  client gone, deadline, client too slow, stop string
                 +--> cancelled at the worker

The numerics contract makes the continuation by another worker the one it would have been.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from protocol.liveness import MAX_DEATHS
from protocol.requests import Finish, Logprobs, Request
from router.common.errors import ApiError, failed, invalid, timed_out, unavailable
from router.common.request_body import ClientGone
from router.generation.attempt import Attempt
from router.generation.placer import Placed, Placer
from router.placement.admission import Admission, Patience
from router.settings import RouterSettings
from router.workers.mailbox import Batch, Mailbox, Trouble
from router.workers.pool import Pool

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 32
"""Those that were handed back included: a bound for workers that do nothing else."""

_RETRY_PAUSE_S = 0.05  # before asking the only worker again, which has just refused
_LOOK_S = 0.1  # between two looks whether the client of a waiting request is still there


class Tokens(NamedTuple):
    """Tokens that came together, and whether the request ended with them."""

    ids: list[int]
    finish: Finish
    logprobs: list[Logprobs] = []  # noqa: RUF012 - never changed; one for each token, or none


class Routing(NamedTuple):
    """What all requests of a router share."""

    pool: Pool
    placer: Placer
    admission: Admission
    settings: RouterSettings


class Wanted(NamedTuple):
    """A request, and what its caller may ask of the router."""

    request: Request
    keys: Sequence[bytes]  # of the prompt's full blocks
    arrived: float  # on time.perf_counter
    patience: Patience
    streamed: bool = True  # to a client, who may be slow


class Generation:
    """Owns a request's work at the workers, and gives it up in ``close()``: call it in the end."""

    def __init__(self, routing: Routing, wanted: Wanted) -> None:
        self._pool = routing.pool
        self._placer = routing.placer
        self._admission = routing.admission
        self._settings = routing.settings
        self._wanted = wanted
        self._request = wanted.request
        self._fingerprint = self._pool.model.fingerprint if self._pool.model else ""
        most = wanted.request.sampling.max_tokens
        self._mailbox = Mailbox(self._settings.client_buffer_tokens if wanted.streamed else most)
        self._emitted: list[int] = []
        self._failed_at: set[str] = set()
        self._pending: Batch | None = None  # trouble that came together with tokens
        self._leave: Callable[[], None] | None = None
        self.attempts: list[Attempt] = []  # the last one may still run
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @property
    def cached_tokens(self) -> int:
        return min(self._mailbox.cached_tokens or 0, len(self._request.prompt))

    @property
    def asks_for_prompt(self) -> bool:
        """Whether ``prompt_logprobs`` are to come."""
        return self._request.sampling.prompt_logprobs is not None

    @property
    def prompt_logprobs(self) -> list[Logprobs]:
        """From the prompt's second token on, where asked for; there when the first token is."""
        return self._mailbox.prompt_logprobs

    def start(self) -> None:
        """Submit. Raises ApiError: 503 when there is no decode worker, 429 when there is too much
        work already."""
        self._leave = self._admission.enter(self._request.priority)
        placed = self._placer.place(self._request, self._wanted.keys)
        if placed is None:
            raise unavailable("no decode worker is attached; try again shortly")
        waited_s = time.perf_counter() - self._wanted.arrived
        self._admission.check_patience(placed.choice.chosen, self._wanted.patience, waited_s)
        self._set_timer("first token", self._settings.first_token_timeout_s)
        self._set_timer("end of the request", self._settings.request_timeout_s)
        self._submit(placed)

    async def next(self) -> Tokens:
        """The next tokens. Raises ApiError or ClientGone; not to be called after a finish."""
        while True:
            batch = self._pending or await self._mailbox.take()
            self._pending = None
            if batch.tokens or batch.finish:
                return self._taken(batch)
            await self._mend(batch)

    def abandon(self) -> None:
        """The client is gone: stop the work at once."""
        self._stop(Trouble.GONE, "the client is gone")

    def close(self) -> None:
        """Let go of everything; cancel what still runs. May be called again."""
        for timer in self._timers.values():
            timer.cancel()
        self._release()
        if self._leave is not None:
            self._leave()

    def _set_timer(self, what: str, seconds: float) -> None:
        reason = f"the {what} did not come within {seconds:g} s"
        loop = asyncio.get_running_loop()
        self._timers[what] = loop.call_later(seconds, self._stop, Trouble.TIMEOUT, reason)

    def _stop(self, trouble: Trouble, reason: str) -> None:
        self._mailbox.fail(trouble, reason)
        self._release()

    def _release(self) -> None:
        if self.attempts:
            self.attempts[-1].release()

    def _submit(self, placed: Placed) -> None:
        """Owns the work from here: ``_release`` cancels it."""
        # An id of its own for each attempt: the same worker may still be forgetting the last one.
        name = f"{self._request.id}.{len(self.attempts) + 1}"
        request = msgspec.structs.replace(self._request.resumed(self._emitted), id=name)
        self.attempts.append(Attempt(self._placer, placed, request, self._mailbox))

    def _taken(self, batch: Batch) -> Tokens:
        if not self._emitted:
            self._timers["first token"].cancel()
        self.attempts[-1].took_tokens()
        tokens, finish, logprobs = batch.tokens, batch.finish, batch.logprobs
        room = self._request.sampling.max_tokens - len(self._emitted)
        if len(tokens) >= room:  # ended, whether or not the worker came to say so
            tokens, finish = tokens[:room], finish or Finish.LENGTH
        self._emitted.extend(tokens)
        if finish:
            self.attempts[-1].finished()
            self._placer.learned.ended(len(self._emitted))
        elif batch.trouble:
            self._pending = batch._replace(tokens=[], logprobs=[])
        return Tokens(tokens, finish, logprobs[:room])

    async def _mend(self, batch: Batch) -> None:
        """Give the request to another worker. Raises when that cannot be."""
        assert batch.trouble is not None
        if not batch.trouble.mendable:
            raise _fatal(batch)
        failed = self.attempts[-1].placed.link
        if batch.trouble is not Trouble.MOVED or failed.ready:  # who drains may be back unharmed
            self._failed_at.add(failed.record.instance)
        self._release()
        tries = len(self.attempts)
        log.warning("request %s, attempt %d: %s", self._request.id, tries, batch.reason)
        if batch.trouble is not Trouble.MOVED:
            self._mailbox.deaths += 1
        if self._mailbox.deaths >= MAX_DEATHS or tries >= MAX_ATTEMPTS:
            raise unavailable(f"failed at {tries} attempts, the last time with: {batch.reason}")
        await self._resubmit()

    async def _resubmit(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._settings.resubmit_wait_s
        while not self._mailbox.lost:
            await self._breathe()
            resumed = self._request.resumed(self._emitted)
            placed = self._placer.place(resumed, self._wanted.keys, self._failed_at)
            if placed is not None and not self._mailbox.lost:
                return self._submit_again(placed)
            if loop.time() >= until:
                raise unavailable("the decode worker was lost, and no other came in time")
            await self._pool.wait_change(_LOOK_S)
        return None

    async def _breathe(self) -> None:
        """Before workers that have just refused are asked again, because there are no others."""
        attached = {i for i, link in self._pool.links.items() if link.ready}
        if attached and attached <= self._failed_at:
            await asyncio.sleep(_RETRY_PAUSE_S * len(self.attempts))

    def _submit_again(self, placed: Placed) -> None:
        model = self._pool.model
        if model is None or model.fingerprint != self._fingerprint:
            raise unavailable("the decode worker was lost, and the model has changed since")
        self._submit(placed)


def _fatal(batch: Batch) -> ApiError | ClientGone:
    if batch.invalid is not None:
        return invalid(batch.reason, batch.invalid.param, batch.invalid.code)
    if batch.trouble is Trouble.GONE:
        return ClientGone()
    if batch.trouble is Trouble.TIMEOUT:
        return timed_out(batch.reason)
    if batch.trouble is Trouble.OVERFLOW:
        return failed(batch.reason, "client_too_slow")
    return failed(batch.reason, "worker_error")
