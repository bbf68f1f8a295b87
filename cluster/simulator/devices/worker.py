"""A worker of either role: its prompts, its steps, its pool.

    prefill   queue --room--> serving (one after the other, in closed form) --> KV held till taken
    decode    queue --room, row--> prompts in steps (steps.py) --+
              reserving --room--> (KV comes) --> joining --row---+--> batch --> gone

Prompts on a decode worker go through its real step policy, step by step. A sequence that decodes
holds its context and half of the answer that it is to get, from the beginning to the end: so much
it takes on average, and nobody is preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from cluster.simulator.devices.cache import BLOCK, Cache
from cluster.simulator.devices.clock import Clock
from cluster.simulator.devices.job import Job, Standing, Told
from cluster.simulator.devices.steps import Steps
from cluster.sizing.snapshot import Machine
from protocol.roles import Role
from router.placement.cost import usable
from router.placement.prefix_index import PrefixIndex
from router.placement.step_model import StepModel

# MERGED cluster.simulate.room
# A worker's pool of KV: what live sequences hold, and who waits for room; the rest is cache.


class Room:
    """``jobs``: all that have to do with the worker, and the tokens that they hold. ``tokens``: of
    the pool; 0: without bound. ``reserved`` is told who has room, in the order in which they
    asked."""

    def __init__(self, tokens: int, cache: Cache, reserved: Callable[[Job], None]) -> None:
        self.jobs: dict[Job, int] = {}
        self.used = 0
        self.cache = cache
        self._tokens = tokens
        self._reserved = reserved
        self._waiting: deque[Job] = deque()

    def fits(self, tokens: int) -> bool:
        """One alone always does: what is too long for a pool is refused before."""
        return not self.used or not self._tokens or self.used + tokens <= self._tokens

    def take(self, job: Job, tokens: int) -> None:
        self.jobs[job] = tokens
        self.used += tokens
        self.cache.take(tokens - min(tokens, len(job.blocks) * BLOCK))

    def give_back(self, job: Job) -> bool:
        """The job has nothing to do with the worker any more. Whether that freed anything: then
        those that waited have it."""
        tokens = self.jobs.pop(job, 0)
        if not tokens:
            return False
        self.used -= tokens
        self.cache.take(min(tokens, len(job.blocks) * BLOCK) - tokens)
        while self._waiting and self.fits(self._waiting[0].need):
            self._reserve(self._waiting.popleft())
        return True

    def reserve(self, job: Job) -> None:
        """All that it will hold, now or later."""
        if not self._waiting and self.fits(job.need):
            self._reserve(job)
        else:
            self._waiting.append(job)

    def _reserve(self, job: Job) -> None:
        self.take(job, job.need)
        self._reserved(job)

    def forget(self, job: Job) -> None:
        """It waits for no room any more."""
        if job in self._waiting:
            self._waiting.remove(job)


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
        self.queue: deque[Job] = deque()
        self.queued_tokens = 0
        self.computing_s = 0.0  # prompts, in closed form
        self.free_s = 0.0  # until then
        self.cache = Cache(self.name, index, machine.kv_tokens)
        self._room = Room(machine.kv_tokens, self.cache, self._reserved)
        self.jobs = self._room.jobs
        self._steps = Steps(self, clock, machine, self.model, pace)
        self.batch = self._steps.batch
        self._clock = clock
        self._told = told
        self._serving: Job | None = None

    @property
    def busy_s(self) -> float:
        return self.computing_s + self.batch.busy_s

    @property
    def prompts(self) -> int:
        """Requests whose prompts are not computed."""
        return len(self.queue) + (self._serving is not None) + len(self._steps.prompts.jobs)

    @property
    def used(self) -> int:
        """Tokens of the pool that live sequences hold."""
        return self._room.used

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
            self._steps.change()
        elif self.queue and self._room.fits(self._wanted(self.queue[0])):
            job = self._serving = self.start()
            seconds = self.model.prefill_s(job.cached, job.context - job.cached, self.machine.chunk)
            self.computing_s += seconds
            self.free_s = self._clock.now + seconds
            self._clock.at(self.free_s, self._served, job, job.attempt)

    @property
    def startable(self) -> bool:
        return (
            bool(self.queue)
            and self._serving is None
            and self.role == "decode"
            and self._steps.rows_free > 0
            and self._room.fits(self._wanted(self.queue[0]))
        )

    def start(self) -> Job:
        """Its prefix is looked up. At least one token is left to compute."""
        job = self.queue.popleft()
        self._room.take(job, self._wanted(job))
        held = self.cache.held(job.blocks) if job.blocks else 0
        job.cached = usable(max(held, job.fetched), job.context)
        job.tail = (job.context - job.cached - 1) % self.machine.chunk + 1
        job.started_s = self._clock.now
        job.stage = "computing"
        if job.d is not self:
            self._told.started(job)
        return job

    def _wanted(self, job: Job) -> int:
        """Tokens of the pool: a prompt that decodes elsewhere is here for a while only."""
        return job.need if job.d is self else job.context

    def _served(self, job: Job, attempt: int) -> None:
        if self._serving is not job or job.attempt != attempt:
            return
        self._serving = None
        self.computed(job)
        self.pump()

    def computed(self, job: Job) -> bool:
        self.queued_tokens -= job.context
        job.stage = "computed"
        if job.blocks:
            self.cache.use(job.blocks)
        self._told.computed(job)
        return job.d is self and job.left > 1

    # ---- KV from elsewhere ------------------------------------------------------------------

    def reserve(self, job: Job) -> None:
        """Room for what it will hold; ``reserved`` is told, now or later."""
        self._room.reserve(job)

    def _reserved(self, job: Job) -> None:
        job.reserved_s = self._clock.now
        self._told.reserved(job)

    def join(self, job: Job) -> None:
        """All its KV is here."""
        if job.blocks:
            self.cache.use(job.blocks)
        self._steps.join(job)

    # ---- going ------------------------------------------------------------------------------

    def finished(self, job: Job) -> None:
        self._told.finished(job)

    def forget(self, job: Job) -> None:
        """It has nothing to do with this worker any more. What waits for room is looked at."""
        if self._room.give_back(job) and self.queue:
            self.pump()
        if self.standing != "serving" and not self.jobs:
            self._told.idle(self)

    def drop(self, job: Job) -> int:
        """Give a job up, wherever it stands here. Returns the tokens that it was given."""
        given = 0
        if job.stage == "decoding" and job.d is self:
            given = self._steps.leave(job)
        elif self._give_up_prompt(job):
            self.queued_tokens -= job.context
        else:
            self._room.forget(job)
            self._steps.forget(job)
        self.forget(job)
        self.pump()
        return max(0, given)

    def _give_up_prompt(self, job: Job) -> bool:
        """Whether it was to be computed here."""
        prompts = self._steps.prompts
        if self._serving is job:
            self._serving = None
        elif job in self.queue:
            self.queue.remove(job)
        elif job in prompts.jobs:
            prompts.remove(job)
        else:
            return False
        return True
