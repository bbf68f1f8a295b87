"""The steps of a simulated worker: its batch, prompts beside it in chunks, sequences that join.

    prompts --computed--+
    joining ----row-----+--> batch --all tokens--> finished
                               |
                               +--KV pool full--> preempted: the newest, to be computed again

Steps follow each other without a pause. Only those boundaries between steps are events at which
something happens: a sequence ends, the pool is full, or a prompt begins or is being computed.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from cluster.simulator.devices.batch import DraftPace, SimulatedBatch
from cluster.simulator.devices.clock import SimulatedClock
from cluster.simulator.devices.request import SimulatedRequest
from engine.scheduling.step_policy import (
    StepBounds,
    StepState,
    plan_decode_step,
    short_first,
)
from protocol.performance.step_model import StepModel
from router.placement.snapshot import Objectives

if TYPE_CHECKING:
    from cluster.simulator.devices.worker import SimulatedWorker


class ChunkedPrompts:
    """Prompts that a decode worker computes in the steps of its batch, by its own step policy.

    All of them have their KV room and a row; they are ordered by arrival. ``goals``: the objectives
    that the policy follows.
    """

    def __init__(self, model: StepModel, chunk: int, goals: Objectives) -> None:
        self.requests: dict[SimulatedRequest, int] = {}  # tokens computed, cached ones included
        self._model = model
        self._chunk = chunk
        self._bounds = StepBounds(ttft_slo_s=goals.ttft_s, tpot_slo_s=goals.tpot_s)

    def add(self, request: SimulatedRequest) -> None:
        self.requests[request] = request.cached

    def pop_computed(self) -> list[SimulatedRequest]:
        done = [r for r, computed in self.requests.items() if computed >= r.context]
        for request in done:
            del self.requests[request]
        return done

    def step(self, batch: SimulatedBatch) -> None:
        """Run one step of the batch with as much of the prompts as the policy puts into it."""
        left = [r.context - c for r, c in self.requests.items()]
        order, short = short_first(left, self._chunk)
        requests = [list(self.requests)[at] for at in order]
        computed = [self.requests[r] for r in requests]
        remaining = [left[at] for at in order]
        state = StepState(
            decoding=batch.rows,
            decode_kv_tokens=int(batch.kv),
            remaining=remaining,
            computed=computed,
            chunk=self._chunk,
            bounds=self._bounds,
            step_time=self._model,
            short=short,
        )
        counts = plan_decode_step(state)
        added_s = sum(
            self._model.prompt_s(before, count)
            for before, count in zip(computed, counts, strict=True)
        )
        batch.advance(1, added_s)
        for request, before, count in zip(requests, computed, counts, strict=True):
            self.requests[request] = before + count


class StepRunner:
    """Schedules the step boundaries of one worker that matter; the worker creates it."""

    def __init__(
        self, worker: SimulatedWorker, clock: SimulatedClock, drafts: DraftPace, goals: Objectives
    ) -> None:
        self.batch = SimulatedBatch(worker.model, drafts)
        self.prompts = ChunkedPrompts(worker.model, worker.machine.chunk, goals)
        self._worker = worker
        self._clock = clock
        self._max_batch = worker.machine.max_batch
        self._joining: deque[SimulatedRequest] = deque()
        self._schedule = 0  # an event of an earlier schedule is stale
        self._due = 0.0  # time of the scheduled event
        self._at_boundary = False

    @property
    def free_rows(self) -> int:
        return self._max_batch - self.batch.rows - len(self.prompts.requests)

    def join(self, request: SimulatedRequest) -> None:
        """Decode the request as soon as a row is free."""
        request.stage = "joining"
        self._joining.append(request)
        self.reschedule()

    def leave(self, request: SimulatedRequest) -> int:
        """Remove a request from the batch; return the tokens it was given, without the last."""
        self.batch.settle(self._clock.now)
        given = min(request.left - 2, self.batch.leave(request))
        self._worker.pool.grow(self.batch.grown)
        return given

    def stop_waiting(self, request: SimulatedRequest) -> None:
        if request in self._joining:
            self._joining.remove(request)

    def _decode(self, request: SimulatedRequest) -> None:
        request.stage = "decoding"
        self.batch.join(request, request.context + 1, request.left - 1)

    def _fill_rows(self) -> None:
        while self._joining and self.free_rows > 0:
            self._decode(self._joining.popleft())

    def settle(self) -> None:
        """Advance the batch to the current time, and count what its sequences have added."""
        if not self._at_boundary:
            self.batch.settle(max(self._clock.now, self._worker.free_s))
            self._worker.pool.grow(self.batch.grown)

    def _preempt_overflow(self) -> None:
        """Preempt the newest sequences until the next step's tokens fit the pool."""
        while self._worker.pool.free_tokens < self.batch.growth:
            prompts = [r for r in self.prompts.requests if r.decode is self._worker]
            candidates = self.batch.requests + prompts
            if len(candidates) < 2:
                return
            newest = max(candidates, key=lambda request: request.number)
            if newest in self.prompts.requests:
                self._worker.preempt(newest, -1, self.prompts.requests.pop(newest))
            else:
                self._worker.preempt(newest, self.leave(newest))

    def reschedule(self) -> None:
        """Compute the next boundary that matters after something came or went."""
        if self._at_boundary or self._worker.state == "gone":
            return
        self._schedule += 1
        self.settle()
        self._fill_rows()
        if self.prompts.requests or self._worker.can_start_prompt:
            when: float | None = self.batch.at
        else:
            when = self.batch.next_end(self._worker.pool.free_tokens)
        if when is not None:
            self._due = when
            self._clock.at(when, self._boundary, self._schedule)

    def reschedule_before_overflow(self) -> None:
        """Reschedule if the pool may be full before the event that is scheduled."""
        if not self._at_boundary and self.batch.rows > 1:
            when = self.batch.next_end(self._worker.pool.free_tokens)
            if when is not None and when < self._due:
                self.reschedule()

    def _boundary(self, schedule: int) -> None:
        if schedule != self._schedule or self._worker.state == "gone":
            return
        self._at_boundary = True  # callbacks do not reschedule; this happens once, at the end
        self.batch.settle(self._clock.now)
        finished = self.batch.pop_finished()
        self._worker.pool.grow(self.batch.grown)
        for request in finished:
            self._worker.on_finished(request)
        for request in self.prompts.pop_computed():
            if self._worker.on_computed(request):
                self._decode(request)
        self._fill_rows()
        self._preempt_overflow()
        while self._worker.can_start_prompt:
            self.prompts.add(self._worker.start_prompt())
        if self.prompts.requests:
            self.prompts.step(self.batch)
        self._at_boundary = False
        self.reschedule()
