"""A worker of either role: its prompts, its batch, its pool.

    prefill   queue --room--> serving (one after the other, in closed form) --> KV held till taken
    decode    queue --room, row--> running (chunks in steps) --+
              reserving --room--> (KV comes) --> joining --row--+--> batch --> gone

Prompts on a decode worker go through its real step policy, step by step. A sequence that decodes
holds its context and half of the answer that it is to get, from the beginning to the end: so much
it takes on average, and nobody is preempted.
"""

from __future__ import annotations

from collections import deque

from cluster.settings import Role
from cluster.simulate.batch import Batch
from cluster.simulate.cache import Cache
from cluster.simulate.clock import Clock
from cluster.simulate.job import Job
from cluster.simulate.prompts import Prompts
from cluster.simulate.room import Room
from cluster.simulate.told import Standing, Told
from cluster.sizing.snapshot import Machine
from router.cost import usable
from router.index import PrefixIndex
from router.step_model import StepModel


class Worker:
    """``role`` as routers see it; ``jobs``: all that have to do with it."""

    def __init__(
        self, number: int, home: Role, machine: Machine, clock: Clock, told: Told,
        index: PrefixIndex, pace: float = 1.0,
    ) -> None:  # fmt: skip
        self.number = number
        self.name = f"{home}-{number}"
        self.home: Role = home
        self.role: Role = home
        self.heading: Role = home  # while it changes: to which role
        self.machine = machine
        self.model = StepModel(*machine.step)
        self.standing: Standing = "serving"
        self.asked_s = self.since_s = clock.now
        self.gone_s: float | None = None
        self.queued_tokens = 0
        self.computing_s = 0.0  # prompts, in closed form
        self._room = Room(machine.kv_tokens, Cache(self.name, index, machine.kv_tokens))
        self.jobs = self._room.jobs
        self.cache = self._room.cache
        self.batch = Batch(self.model, pace)
        self.queue: deque[Job] = deque()
        self._clock = clock
        self._told = told
        self._serving: Job | None = None
        self._serving_until = 0.0
        self._prompts = Prompts(self.model, machine.chunk)
        self._reserving: deque[Job] = deque()
        self._joining: deque[Job] = deque()
        self._turn = 0  # an event of another turn is stale
        self._at_boundary = False

    @property
    def busy_s(self) -> float:
        return self.computing_s + self.batch.busy_s

    @property
    def prompts(self) -> int:
        """Requests whose prompts are not computed."""
        return len(self.queue) + (self._serving is not None) + len(self._prompts.jobs)

    @property
    def used(self) -> int:
        """Tokens of the pool that live sequences hold."""
        return self._room.used

    def forget(self, job: Job) -> None:
        """It has nothing to do with this worker any more. What waits for room is looked at."""
        if self._room.give_back(job):
            while self._reserving and self._room.fits(self._reserving[0].need):
                self._reserve(self._reserving.popleft())
            if self.queue:
                self.pump()
        if self.standing != "serving" and not self.jobs:
            self._told.idle(self)

    # ---- prompts ----------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Compute its context."""
        self.jobs.setdefault(job, 0)
        self.queue.append(job)
        self.queued_tokens += job.context
        self.pump()

    def pump(self) -> None:
        """Begin what can begin."""
        if self._serving is not None or self.standing == "gone":
            return
        if self.role == "decode":
            self._change()
            return
        if self.queue and self._room.fits(self.queue[0].context):
            job = self._serving = self.queue.popleft()
            self._room.take(job, job.context)
            self._begin(job)
            seconds = self.model.prefill_s(job.cached, job.context - job.cached, self.machine.chunk)
            self.computing_s += seconds
            self._serving_until = self._clock.now + seconds
            self._clock.at(self._serving_until, self._served, job, job.attempt)

    def _begin(self, job: Job) -> None:
        """Its prefix is looked up. At least one token is left to compute."""
        held = self.cache.held(job.blocks) if job.blocks else 0
        job.cached = usable(max(held, job.fetched), job.context)
        job.tail = (job.context - job.cached - 1) % self.machine.chunk + 1
        job.started_s = self._clock.now
        job.stage = "computing"
        if job.d is not self:
            self._told.started(job)

    def _served(self, job: Job, attempt: int) -> None:
        if self._serving is not job or job.attempt != attempt:
            return
        self._serving = None
        self._computed(job)
        self.pump()

    def _computed(self, job: Job) -> None:
        self.queued_tokens -= job.context
        job.stage = "computed"
        if job.blocks:
            self.cache.use(job.blocks)
        self._told.computed(job)

    # ---- KV from elsewhere ------------------------------------------------------------------

    def reserve(self, job: Job) -> None:
        """Room for what it will hold; ``reserved`` is told, now or later."""
        if not self._reserving and self._room.fits(job.need):
            self._reserve(job)
        else:
            self._reserving.append(job)

    def _reserve(self, job: Job) -> None:
        self._room.take(job, job.need)
        job.reserved_s = self._clock.now
        self._told.reserved(job)

    def join(self, job: Job) -> None:
        """All its KV is here."""
        if job.blocks:
            self.cache.use(job.blocks)
        job.stage = "joining"
        self._joining.append(job)
        self._change()

    # ---- steps ------------------------------------------------------------------------------

    @property
    def _seats(self) -> int:
        return self.machine.max_batch - self.batch.rows - len(self._prompts.jobs)

    def _change(self) -> None:
        """Something came or went: when is the next boundary that matters?"""
        if self._at_boundary or self.standing == "gone":
            return
        self._turn += 1
        self.batch.settle(max(self._clock.now, self._serving_until))
        self._seat_joining()
        if self._prompts.jobs or (self.queue and self._serving is None and self._startable):
            self._clock.at(self.batch.at, self._boundary, self._turn)
        else:
            when = self.batch.next_end()
            if when is not None:
                self._clock.at(when, self._boundary, self._turn)

    def _seat_joining(self) -> None:
        while self._joining and self._seats > 0:
            self._seat(self._joining.popleft())

    def _seat(self, job: Job) -> None:
        job.stage = "decoding"
        self.batch.join(job, job.context + 1, job.left - 1)

    @property
    def _startable(self) -> bool:
        return (
            self.role == "decode"
            and self._seats > 0
            and self._room.fits(self._wanted(self.queue[0]))
        )

    def _wanted(self, job: Job) -> int:
        """Tokens of the pool: a prompt of another decode worker's is here for a while only."""
        return job.need if job.d is self else job.context

    def _boundary(self, turn: int) -> None:
        if turn != self._turn or self.standing == "gone":
            return
        self._at_boundary = True  # what comes of it is looked at in the end, once
        self.batch.settle(self._clock.now)
        for job in self.batch.ended():
            self._told.finished(job)
        for job in self._prompts.take_computed():
            self._computed(job)
            if job.d is self and job.left > 1:
                self._seat(job)
        self._seat_joining()
        while self.queue and self._startable:
            job = self.queue.popleft()
            self._room.take(job, self._wanted(job))
            self._begin(job)
            self._prompts.add(job)
        if self._prompts.jobs:
            self._prompts.step(self.batch)
        self._at_boundary = False
        self._change()

    # ---- going ------------------------------------------------------------------------------

    def drop(self, job: Job) -> int:
        """Give a job up, wherever it stands here. Returns the tokens that it was given."""
        given = 0
        if job.stage == "decoding" and job.d is self:
            self.batch.settle(self._clock.now)
            given = min(job.left - 2, int(self.batch.leave(job) * self.batch.pace))
        elif self._serving is job:
            self._serving = None
            self.queued_tokens -= job.context
        elif job in self.queue:
            self.queue.remove(job)
            self.queued_tokens -= job.context
        elif job in self._prompts.jobs:
            self._prompts.remove(job)
            self.queued_tokens -= job.context
        elif job in self._reserving:
            self._reserving.remove(job)
        elif job in self._joining:
            self._joining.remove(job)
        self.forget(job)
        self.pump()
        return max(0, given)
