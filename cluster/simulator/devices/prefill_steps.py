"""The steps of a simulated prefill worker: prompts by age, several of them in one step.

A step computes ``chunk`` prompt tokens. The oldest prompt may take all of them that short ones
leave, and what its last chunk leaves goes to those behind it, as in ``engine/scheduling``. The
whole chunks of a long prompt are one event, unless a short prompt comes meanwhile, or an older one,
which a fetch or a failure has delayed, the prompt is dropped, or the worker becomes a decode
worker, which computes the rest in its own steps: then the chunk that is being computed is the last
one.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cluster.simulator.devices.clock import SimulatedClock
from cluster.simulator.devices.request import SimulatedRequest
from engine.scheduling.step_policy import chunks_in_order, short_first
from protocol.performance.step_model import is_short_prompt

if TYPE_CHECKING:
    from cluster.simulator.devices.worker import SimulatedWorker


class _RunningSteps(NamedTuple):
    """One step, or those of the whole chunks of one prompt."""

    begin: float
    seconds: float
    counts: dict[SimulatedRequest, int]  # tokens
    attempts: dict[SimulatedRequest, int]
    before: dict[SimulatedRequest, int]  # tokens of the same prompts that were computed at begin

    @property
    def tokens(self) -> int:
        return sum(self.counts.values())


class PrefillStepRunner:
    """Computes the prompts of one worker in its prefill role; the worker creates it.

    ``prompts``: tokens computed of each admitted prompt, cached ones included, by age. ``free_s``:
    end of the running step. ``busy_s``: seconds of all steps, from the beginning of each on.
    ``tokens``: prompt tokens computed in them.
    """

    def __init__(self, worker: SimulatedWorker, clock: SimulatedClock) -> None:
        self.prompts: dict[SimulatedRequest, int] = {}
        self.free_s = self.busy_s = 0.0
        self.tokens = 0
        self._running: _RunningSteps | None = None
        self._worker = worker
        self._clock = clock
        self._chunk = worker.machine.chunk
        self._model = worker.model

    @property
    def is_running(self) -> bool:
        return self._running is not None

    def run(self) -> None:
        """Begin the next step, unless one is running or there is nothing to compute."""
        if self._running is not None:
            if self._running.tokens > self._chunk and self._is_in_the_way(self._running):
                self._end_at_next_chunk(self._running)
            return
        while self._older_waits() and self._worker.can_admit_prompt:
            self._admit()
        while self._short_waits() and self._worker.can_admit_prompt:
            self._admit()  # as an engine admits all that fit before each step
        counts = self._beside_short() or self._whole_chunks() or self._shared_step()
        if counts:
            self._begin(counts)

    def computed_tokens(self) -> dict[SimulatedRequest, int]:
        """Return the tokens of each admitted prompt that are computed by now, in whole chunks."""
        computed, running = dict(self.prompts), self._running
        if running is not None and running.tokens > self._chunk:
            ((request, whole),) = running.counts.items()
            if not self._was_dropped(request, running):
                computed[request] += self._chunks_until_now(running, request, whole) * self._chunk
        return computed

    def _chunks_until_now(
        self, running: _RunningSteps, request: SimulatedRequest, whole: int
    ) -> int:
        def seconds(chunks: int) -> float:
            return self._seconds({request: chunks * self._chunk}, running.before)

        passed_s, most = self._clock.now - running.begin, whole // self._chunk
        return bisect.bisect_right(range(1, most + 1), passed_s, key=seconds)

    def take_prompts(self) -> dict[SimulatedRequest, int]:
        """Return the prompts between two steps, and compute none of them any more."""
        assert self._running is None
        prompts, self.prompts = self.prompts, {}
        return prompts

    def _older_waits(self) -> bool:
        """Return whether a prompt waits that is older than all that are computed."""
        first = next(iter(self.prompts), None)
        queue = self._worker.queue
        return bool(queue) and (first is None or queue[0].age < first.age)

    def _short_waits(self) -> bool:
        worker, chunk = self._worker, self._chunk
        return any(is_short_prompt(worker.uncached_tokens(r), chunk) for r in worker.queue)

    def _is_in_the_way(self, running: _RunningSteps) -> bool:
        """Return whether the rest of these chunks is not computed next."""
        dropped = any(self._was_dropped(r, running) for r in running.counts)
        waits = self._older_waits() or self._short_waits()
        return dropped or waits or self._worker.role != "prefill"

    def _was_dropped(self, request: SimulatedRequest, running: _RunningSteps) -> bool:
        return request not in self.prompts or request.attempt != running.attempts[request]

    def _begin(self, counts: dict[SimulatedRequest, int]) -> None:
        attempts, before = ({r: r.attempt for r in counts}, {r: self.prompts[r] for r in counts})
        seconds = self._seconds(counts, before)
        self._schedule(_RunningSteps(self._clock.now, seconds, counts, attempts, before))

    def _schedule(self, steps: _RunningSteps) -> None:
        self._running = steps
        self.busy_s += steps.seconds
        self.tokens += steps.tokens
        self.free_s = steps.begin + steps.seconds
        self._clock.at(self.free_s, self._end, steps)

    def _seconds(
        self, counts: dict[SimulatedRequest, int], before: dict[SimulatedRequest, int]
    ) -> float:
        added_s = sum(self._model.prompt_s(before[r], n) for r, n in counts.items())
        return math.ceil(sum(counts.values()) / self._chunk) * self._model.step + added_s

    def _end_at_next_chunk(self, running: _RunningSteps) -> None:
        """Let the prompt that is computed end its present chunk, and no further one."""
        ((request, whole),) = running.counts.items()
        passed_s = self._clock.now - running.begin
        for count in range(self._chunk, whole, self._chunk):
            seconds = self._seconds({request: count}, running.before)
            if seconds >= passed_s:
                self.busy_s -= running.seconds
                self.tokens -= running.tokens
                self._schedule(running._replace(seconds=seconds, counts={request: count}))
                return

    def _whole_chunks(self) -> dict[SimulatedRequest, int]:
        """Return the tokens of the first prompt before its last chunk, if there are any; those of
        one chunk where an older prompt cannot begin yet."""
        for request, computed in self.prompts.items():
            whole = (request.context - computed - 1) // self._chunk * self._chunk
            count = min(whole, self._chunk) if self._older_waits() else whole
            return {request: count} if count > 0 else {}
        return {}

    def _beside_short(self) -> dict[SimulatedRequest, int]:
        """Return the tokens of a step in which short prompts go beside older and longer ones; none
        where there are no such prompts."""
        requests = list(self.prompts)
        remaining = [r.context - done for r, done in self.prompts.items()]
        order, short = short_first(remaining, self._chunk)
        return self._in_order([requests[at] for at in order]) if short else {}

    def _shared_step(self) -> dict[SimulatedRequest, int]:
        requests = list(self.prompts)
        left = self._chunk - sum(r.context - done for r, done in self.prompts.items())
        while left > 0 and self._worker.can_admit_prompt:
            requests.append(self._admit())
            left -= requests[-1].context - requests[-1].cached
        return self._in_order(requests)

    def _in_order(self, requests: Sequence[SimulatedRequest]) -> dict[SimulatedRequest, int]:
        remaining = [r.context - self.prompts[r] for r in requests]
        counts = chunks_in_order(remaining, self._chunk)
        return {r: n for r, n in zip(requests, counts, strict=True) if n}

    def _admit(self) -> SimulatedRequest:
        request = self._worker.start_prompt()
        self.prompts[request] = request.cached
        self.prompts = dict(sorted(self.prompts.items(), key=lambda item: item[0].age))
        return request

    def _end(self, steps: _RunningSteps) -> None:
        if self._worker.state == "gone" or steps is not self._running:
            return
        for request, count in steps.counts.items():
            if self._was_dropped(request, steps):
                continue
            self.prompts[request] += count
            if self.prompts[request] >= request.context:
                del self.prompts[request]
                self._worker.on_computed(request)  # which may pump: the step still runs
            else:
                self._worker.on_progress(request, self.prompts[request])
        self._running = None
        self._worker.pump()
