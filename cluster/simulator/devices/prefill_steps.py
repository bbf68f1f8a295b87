"""The steps of a simulated prefill worker: prompts in order, several of them in one step.

A step computes ``chunk`` prompt tokens. The first prompt may take all of them, and what its last
chunk leaves goes to those behind it, as in ``engine/scheduling``. The whole chunks of a long prompt
are one event, because nothing else can take part in them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cluster.simulator.devices.clock import SimulatedClock
from cluster.simulator.devices.request import SimulatedRequest
from cluster.sizing.snapshot import MachineModel
from protocol.performance.step_model import StepModel

if TYPE_CHECKING:
    from cluster.simulator.devices.worker import SimulatedWorker


class PrefillStepRunner:
    """Computes the prompts of one worker in its prefill role; the worker creates it.

    ``prompts``: tokens computed of each admitted prompt, cached ones included. ``free_s``: end of
    the running step. ``busy_s``: seconds of all steps, from the beginning of each on. ``tokens``:
    prompt tokens computed in them.
    """

    def __init__(
        self, worker: SimulatedWorker, clock: SimulatedClock, machine: MachineModel,
        model: StepModel,
    ) -> None:  # fmt: skip
        self.prompts: dict[SimulatedRequest, int] = {}
        self.free_s = self.busy_s = 0.0
        self.tokens = 0
        self.is_running = False
        self._worker = worker
        self._clock = clock
        self._chunk = machine.chunk
        self._model = model

    def run(self) -> None:
        """Begin the next step, unless one is running or there is nothing to compute."""
        if self.is_running:
            return
        counts = self._whole_chunks() or self._shared_step()
        if not counts:
            return
        added_s = sum(self._model.prompt_s(self.prompts[r], n) for r, n in counts.items())
        tokens = sum(counts.values())
        seconds = math.ceil(tokens / self._chunk) * self._model.step + added_s
        self.is_running = True
        self.busy_s += seconds
        self.tokens += tokens
        self.free_s = self._clock.now + seconds
        self._clock.at(self.free_s, self._end, [(r, r.attempt, n) for r, n in counts.items()])

    def _whole_chunks(self) -> dict[SimulatedRequest, int]:
        """Return the tokens of the first prompt before its last chunk, if there are any."""
        if not self.prompts and self._worker.can_admit_prompt:
            self._admit()
        for request, computed in self.prompts.items():
            whole = (request.context - computed - 1) // self._chunk * self._chunk
            return {request: whole} if whole > 0 else {}
        return {}

    def _shared_step(self) -> dict[SimulatedRequest, int]:
        counts = {r: min(self._chunk, r.context - done) for r, done in self.prompts.items()}
        left = self._chunk - sum(counts.values())
        while left > 0 and counts and self._worker.can_admit_prompt:
            request = self._admit()
            counts[request] = min(left, request.context - request.cached)
            left -= counts[request]
        return counts

    def _admit(self) -> SimulatedRequest:
        request = self._worker.start_prompt()
        self.prompts[request] = request.cached
        return request

    def _end(self, counts: list[tuple[SimulatedRequest, int, int]]) -> None:
        if self._worker.state == "gone":
            return
        for request, attempt, count in counts:
            if request.attempt != attempt or request not in self.prompts:
                continue  # dropped while the step ran
            self.prompts[request] += count
            if self.prompts[request] >= request.context:
                del self.prompts[request]
                self._worker.on_computed(request)  # which may pump: the step still runs
        self.is_running = False
        self._worker.pump()
