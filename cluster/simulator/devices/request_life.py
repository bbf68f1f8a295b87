"""A request's way through the workers: who tells whom what, and when.

arrive --choose, admit--> enter --> P: started, computed --> D: reserved --> KV carried --> join
              ^                                                                     --> finished
              +---- a worker died, or hands over what it cannot finish ----+
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.observation.request_mix import Counter
from cluster.simulator.devices.clock import Clock
from cluster.simulator.devices.job import Job, Status
from cluster.simulator.devices.network import Network
from cluster.simulator.devices.routing import Router
from cluster.simulator.devices.transfer import Carrier
from cluster.simulator.devices.worker import Worker
from protocol.liveness import MAX_DEATHS
from router.common.errors import ApiError
from router.placement.admission import check_patience
from router.placement.cost import LOCAL_PATH_S, Placement, usable

RESUBMIT_S = 10.0
"""How long a request waits for a decode worker (``RouterSettings.resubmit_wait_s``)."""


class Life:
    """``idle``: told of workers that are to go or to change and have nothing left to do.
    ``path_s``: to a prefill worker and back, beyond queue and computing."""

    def __init__(
        self, clock: Clock, router: Router, network: Network, counter: Counter, path_s: float
    ) -> None:
        self.on_idle: Callable[[Worker], None] = lambda worker: None
        self.most_tokens = 0  # of a sequence: what the largest pool takes; 0: not known
        self.ended: list[Job] = []
        self.refusals = 0
        self.moved = 0  # attempts that began anew, unharmed
        self._clock = clock
        self._router = router
        self._carrier = Carrier(clock, router, network, self._received)
        self._counter = counter
        self._path_s = path_s
        self._waiting: list[Job] = []  # for a decode worker

    # ---- in ---------------------------------------------------------------------------------

    def arrive(self, job: Job) -> None:
        self._counter.arrived(job.prompt)
        if self.most_tokens and job.prompt + job.output > self.most_tokens:
            self._end(job, "too_long")
        else:
            self._place(job, job.attempt)

    def _place(self, job: Job, attempt: int) -> None:
        if job.attempt != attempt or job.status:
            return
        choice = self._router.choose(job)
        if choice is None:
            self._waiting.append(job)
            self._clock.at(self._clock.now + RESUBMIT_S, self._give_up, job, attempt)
            return
        if not job.emitted and job.attempt == 1:
            waited_s = self._clock.now - job.at
            try:
                check_patience(choice.chosen, self._router.terms.patience, waited_s)
            except ApiError:
                self._end(job, "refused")
                return
        self._enter(job, choice.chosen)

    def _give_up(self, job: Job, attempt: int) -> None:
        if job in self._waiting and job.attempt == attempt:
            self._waiting.remove(job)
            self._end(job, "failed")

    def workers_changed(self) -> None:
        """Those that waited for a worker try again."""
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            job.clear()
            self._place(job, job.attempt)

    def _enter(self, job: Job, chosen: Placement) -> None:
        router = self._router
        d = job.d = router.decode.named(chosen.decode)
        job.p = None if chosen.prefill is None else router.prefill.named(chosen.prefill)
        job.need = job.context + (job.left + 1) // 2
        router.enter(job, chosen)
        d.jobs[job] = 0
        computing = job.p or d
        computing.jobs[job] = 0
        if chosen.p.fetch is None:
            computing.submit(job)
        else:
            job.fetched = chosen.p.fetch.tokens
            at = self._clock.now + chosen.p.fetch.seconds
            self._clock.at(at, self._fetched, job, job.attempt)

    def _fetched(self, job: Job, attempt: int) -> None:
        if job.attempt == attempt and job.d is not None:
            (job.p or job.d).submit(job)

    # ---- what workers tell ------------------------------------------------------------------

    def started(self, job: Job) -> None:
        assert job.d is not None
        if job.blocks:
            job.kv_cached = usable(job.d.cache.held(job.blocks), job.context)
        job.d.reserve(job)

    def reserved(self, job: Job) -> None:
        assert job.p is not None and job.d is not None
        self._carrier.open(job)

    def computed(self, job: Job) -> None:
        now = self._clock.now
        path_s = LOCAL_PATH_S if job.p is None else self._path_s
        first_s = now + path_s
        self._router.first_token(job, first_s - job.at if job.attempt == 1 else None)
        job.computed_s = now
        if job.first_s is None:
            job.first_s = first_s
            job.uncached = job.context - job.cached
            self._counter.first_token(job.prompt, min(job.cached, job.prompt), first_s - job.at)
        if job.left <= 1:
            self._last_token(job, first_s)
        elif job.p is not None:
            assert job.d is not None
            self._router.learned.path(job.p.name, job.d.name, self._path_s)
            self._carrier.computed(job)

    def _received(self, job: Job) -> None:
        assert job.p is not None and job.d is not None
        job.p.forget(job)
        job.d.join(job)

    def finished(self, job: Job) -> None:
        self._last_token(job, self._clock.now)

    def idle(self, worker: Worker) -> None:
        self.on_idle(worker)

    # ---- out --------------------------------------------------------------------------------

    def _last_token(self, job: Job, at: float) -> None:
        assert job.d is not None
        if job.p is not None and job.stage == "computed":  # its first token was its last
            self._carrier.give_up(job)
            job.p.drop(job)
        d, stage = job.d, job.stage
        job.stage = "ended"
        self._router.books.close(d.number)
        if stage == "decoding":
            d.forget(job)
        else:
            d.drop(job)
        job.done_s = at
        self._router.learned.ended(job.output)
        self._end(job, "ok")
        self._counter.ended(job.output, job.tpot_s)

    def _end(self, job: Job, status: Status) -> None:
        job.status, job.stage = status, "ended"
        self.refusals += status == "refused"
        self.ended.append(job)

    def restart(self, job: Job, after_s: float, *, died: bool) -> None:
        """Elsewhere, from the tokens that are out; the third death ends it."""
        d = job.d
        assert d is not None
        out = job.computed_s is not None
        if not out:
            self._router.first_token(job)
        if job.p is not None:
            if job.stage in ("placed", "computing", "computed"):
                self._carrier.give_up(job)
            job.p.drop(job)
        given = d.drop(job)
        self._router.books.close(d.number)
        if out:
            job.emitted += 1 + given
        job.deaths += died
        self.moved += not died
        job.clear()
        if job.deaths >= MAX_DEATHS:
            self._end(job, "failed")
        else:
            self._clock.at(self._clock.now + after_s, self._place, job, job.attempt)
