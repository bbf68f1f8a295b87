"""Steps of a worker: its batch, prompts beside it in chunks, and whose KV has come.

    prompts --computed--+
    joining ----row-----+--> batch --all tokens--> gone

Steps follow each other without a pause. Of the boundaries between them only those are events at
which something happens: somebody ends, or a prompt begins or is under way.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from cluster.simulator.devices.batch import Batch
from cluster.simulator.devices.clock import Clock
from cluster.simulator.devices.job import Job, Standing
from cluster.sizing.snapshot import Machine
from decode_worker.policy import plan
from engine.scheduling.step_policy import StepState
from engine.scheduling.step_time import Coefficients
from router.placement.step_model import StepModel

# MERGED cluster.simulate.prompts
# Prompts that a decode worker computes beside its batch, by its own step policy.


class Prompts:
    """Those that have their pages and a row, in the order in which they came."""

    def __init__(self, model: StepModel, chunk: int) -> None:
        self.jobs: dict[Job, int] = {}  # tokens computed, cached ones included
        self._model = model
        self._chunk = chunk
        self._coefficients = Coefficients(*model)

    def add(self, job: Job) -> None:
        self.jobs[job] = job.cached

    def remove(self, job: Job) -> None:
        del self.jobs[job]

    def take_computed(self) -> list[Job]:
        done = [job for job, computed in self.jobs.items() if computed >= job.context]
        for job in done:
            del self.jobs[job]
        return done

    def step(self, batch: Batch) -> None:
        """One step of the batch, with as much of the prompts as the policy puts into it."""
        computed = list(self.jobs.values())
        remaining = [job.context - c for job, c in zip(self.jobs, computed, strict=True)]
        state = StepState(
            decoding=batch.rows,
            decode_kv_tokens=int(batch.kv),
            remaining=remaining,
            computed=computed,
            chunk=self._chunk,
            step_time=self._coefficients,
        )
        counts = plan(state)
        added_s = sum(
            self._model.prompt_s(before, count)
            for before, count in zip(computed, counts, strict=True)
        )
        batch.advance(1, added_s)
        for job, before, count in zip(list(self.jobs), computed, counts, strict=True):
            self.jobs[job] = before + count


class Owner(Protocol):
    """The worker, as its steps see it."""

    standing: Standing
    free_s: float
    """When it can step: until then it computes a prompt in closed form."""

    @property
    def startable(self) -> bool:
        """Whether a prompt waits for a step that it could be in."""

    def start(self) -> Job:
        """That prompt, which is under way from now on."""

    def computed(self, job: Job) -> bool:
        """A prompt is computed. Whether it is to decode here."""

    def finished(self, job: Job) -> None:
        """It has all its tokens."""


class Steps:
    def __init__(
        self, owner: Owner, clock: Clock, machine: Machine, model: StepModel, pace: float
    ) -> None:
        self.batch = Batch(model, pace)
        self.prompts = Prompts(model, machine.chunk)
        self._owner = owner
        self._clock = clock
        self._max_batch = machine.max_batch
        self._joining: deque[Job] = deque()
        self._turn = 0  # an event of another turn is stale
        self._at_boundary = False

    @property
    def rows_free(self) -> int:
        return self._max_batch - self.batch.rows - len(self.prompts.jobs)

    # ---- in and out -------------------------------------------------------------------------

    def join(self, job: Job) -> None:
        """It decodes as soon as there is a row."""
        job.stage = "joining"
        self._joining.append(job)
        self.change()

    def leave(self, job: Job) -> int:
        """Out of the batch. Returns the tokens that it was given; the last is never among them."""
        self.batch.settle(self._clock.now)
        return min(job.left - 2, int(self.batch.leave(job) * self.batch.pace))

    def forget(self, job: Job) -> None:
        """It waits for no row any more."""
        if job in self._joining:
            self._joining.remove(job)

    def _seat(self, job: Job) -> None:
        job.stage = "decoding"
        self.batch.join(job, job.context + 1, job.left - 1)

    def _seat_joining(self) -> None:
        while self._joining and self.rows_free > 0:
            self._seat(self._joining.popleft())

    # ---- boundaries -------------------------------------------------------------------------

    def change(self) -> None:
        """Something came or went: when is the next boundary that matters?"""
        if self._at_boundary or self._owner.standing == "gone":
            return
        self._turn += 1
        self.batch.settle(max(self._clock.now, self._owner.free_s))
        self._seat_joining()
        if self.prompts.jobs or self._owner.startable:
            self._clock.at(self.batch.at, self._boundary, self._turn)
        else:
            when = self.batch.next_end()
            if when is not None:
                self._clock.at(when, self._boundary, self._turn)

    def _boundary(self, turn: int) -> None:
        if turn != self._turn or self._owner.standing == "gone":
            return
        self._at_boundary = True  # what comes of it is looked at in the end, once
        self.batch.settle(self._clock.now)
        for job in self.batch.ended():
            self._owner.finished(job)
        for job in self.prompts.take_computed():
            if self._owner.computed(job):
                self._seat(job)
        self._seat_joining()
        while self._owner.startable:
            self.prompts.add(self._owner.start())
        if self.prompts.jobs:
            self.prompts.step(self.batch)
        self._at_boundary = False
        self.change()
