"""One request across decode workers: submitted, perhaps resubmitted, finished or given up.

    start -> submitted --tokens--> ... --finish--> done
                 |  stream broken, or an error that another worker may not have
                 +--> resubmitted with the tokens so far (at most 3 attempts in all)
                 |  client gone, deadline, client too slow, stop string
                 +--> cancelled at the worker

The numerics contract makes the continuation by another worker the one it would have been.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

import msgspec

from protocol import wire_pb2 as pb
from protocol.request import Finish, Request, to_wire
from router.body import ClientGone
from router.errors import ApiError, failed, timed_out, unavailable
from router.link import DecodeLink
from router.mailbox import Batch, Mailbox, Trouble
from router.settings import RouterSettings
from router.workers import Charge, Pool

log = logging.getLogger(__name__)

ATTEMPTS = 3
_RETRY_PAUSE_S = 0.05  # before asking the only worker again, which has just refused
_LOOK_S = 0.1  # between two looks whether the client of a waiting request is still there


class Tokens(NamedTuple):
    """Tokens that came together, and whether the request ended with them."""

    ids: list[int]
    finish: Finish


class Generation:
    """Owns a request's work at the workers, and gives it up in ``close()``: call it in the end."""

    def __init__(self, pool: Pool, request: Request, settings: RouterSettings) -> None:
        self._pool = pool
        self._request = request
        self._settings = settings
        self._fingerprint = pool.model.fingerprint if pool.model else ""
        self._mailbox = Mailbox(settings.client_buffer_tokens)
        self._emitted: list[int] = []
        self._attempt = 0
        self._failed_at: set[str] = set()
        self._pending: Batch | None = None  # trouble that came together with tokens
        self._link: DecodeLink | None = None
        self._wire_id = ""
        self._charge: Charge | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @property
    def cached_tokens(self) -> int:
        return min(self._mailbox.cached_tokens, len(self._request.prompt))

    def start(self) -> None:
        """Submit. Raises ApiError (503) when there is no decode worker."""
        link = self._pool.choose(self._request.length_limit)
        if link is None:
            raise unavailable("no decode worker is attached; try again shortly")
        self._set_timer("first token", self._settings.first_token_timeout_s)
        self._set_timer("end of the request", self._settings.request_timeout_s)
        self._submit(link)

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

    def _set_timer(self, what: str, seconds: float) -> None:
        reason = f"the {what} did not come within {seconds:g} s"
        loop = asyncio.get_running_loop()
        self._timers[what] = loop.call_later(seconds, self._stop, Trouble.TIMEOUT, reason)

    def _stop(self, trouble: Trouble, reason: str) -> None:
        self._mailbox.fail(trouble, reason)
        self._release()

    def _release(self) -> None:
        if self._link is not None:
            self._link.cancel(self._wire_id)
            self._link = None
        self._release_charge()

    def _release_charge(self) -> None:
        if self._charge is not None:
            self._charge.release()
            self._charge = None

    def _submit(self, link: DecodeLink) -> None:
        """Owns the work from here: ``_release`` cancels it."""
        self._attempt += 1
        # An id of its own for each attempt: the same worker may still be forgetting the last one.
        self._wire_id = f"{self._request.id}.{self._attempt}"
        request = msgspec.structs.replace(self._request.resumed(self._emitted), id=self._wire_id)
        candidates = self._pool.prefill_candidates()
        if candidates:
            self._charge = self._pool.charge(candidates[0].instance, len(request.context))
        link.submit(pb.Submit(request=to_wire(request), prefill=candidates), self._mailbox)
        self._link = link

    def _taken(self, batch: Batch) -> Tokens:
        if not self._emitted:
            self._timers["first token"].cancel()
        self._release_charge()
        tokens, finish = batch.tokens, batch.finish
        room = self._request.sampling.max_tokens - len(self._emitted)
        if len(tokens) >= room:  # ended, whether or not the worker came to say so
            tokens, finish = tokens[:room], finish or Finish.LENGTH
        self._emitted.extend(tokens)
        if batch.trouble and not finish:
            self._pending = batch._replace(tokens=[])
        return Tokens(tokens, finish)

    async def _mend(self, batch: Batch) -> None:
        """Give the request to another worker. Raises when that cannot be."""
        assert batch.trouble is not None
        if not batch.trouble.mendable:
            raise _fatal(batch)
        if self._link is not None:
            self._failed_at.add(self._link.record.instance)
        self._release()
        log.warning("request %s, attempt %d: %s", self._request.id, self._attempt, batch.reason)
        if self._attempt >= ATTEMPTS:
            raise unavailable(f"failed at {ATTEMPTS} attempts, the last time with: {batch.reason}")
        await self._resubmit()

    async def _resubmit(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._settings.resubmit_wait_s
        while not self._mailbox.lost:
            link = self._pool.choose(self._request.length_limit, self._failed_at)
            if link is not None:
                await self._breathe(link)
            if link is not None and link.attached and not self._mailbox.lost:
                return self._submit_again(link)
            if loop.time() >= until:
                raise unavailable("the decode worker was lost, and no other came in time")
            await self._pool.wait_change(_LOOK_S)
        return None

    async def _breathe(self, link: DecodeLink) -> None:
        if link.record.instance in self._failed_at:
            await asyncio.sleep(_RETRY_PAUSE_S * self._attempt)

    def _submit_again(self, link: DecodeLink) -> None:
        model = self._pool.model
        if model is None or model.fingerprint != self._fingerprint:
            raise unavailable("the decode worker was lost, and the model has changed since")
        self._submit(link)


def _fatal(batch: Batch) -> ApiError | ClientGone:
    if batch.trouble is Trouble.GONE:
        return ClientGone()
    if batch.trouble is Trouble.TIMEOUT:
        return timed_out(batch.reason)
    if batch.trouble is Trouble.OVERFLOW:
        return failed(batch.reason, "client_too_slow")
    return failed(batch.reason, "worker_error")
