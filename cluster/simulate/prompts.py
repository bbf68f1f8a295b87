"""Prompts that a decode worker computes beside its batch, by its own step policy."""

from __future__ import annotations

from cluster.simulate.batch import Batch
from cluster.simulate.job import Job
from decode_worker.policy import plan
from engine.policy import StepState
from engine.step_time import Coefficients
from router.step_model import StepModel


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
