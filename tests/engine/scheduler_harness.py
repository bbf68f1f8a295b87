"""A scheduler with everything of an engine except the model, whose tokens are invented."""

from __future__ import annotations

from engine.kv_cache.block_manager import BlockManager
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Phase, Sequence
from engine.scheduling.step_policy import StepBounds, StepPlan, StepPlanner, plan_decode_step
from engine.scheduling.step_time import StepTimeModel
from protocol.block_keys import BLOCK_TOKENS
from protocol.requests import Request
from protocol.sampling_params import SamplingParams

ROOT = bytes(16)


def make_request(prompt: list[int], max_tokens: int = 8, priority: int = 0) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(
        id="r", prompt=tuple(prompt), sampling=sampling, cache_root=ROOT, priority=priority
    )


class SchedulerHarness:
    """Steps a scheduler like ``Engine.run``. The next token is a function of the position."""

    def __init__(self, pages: int, rows: int = 8, chunk: int = 64) -> None:
        self.manager = BlockManager(pages)
        planner = StepPlanner(plan_decode_step, chunk, StepBounds(), StepTimeModel())
        self.scheduler = Scheduler(self.manager, rows, planner)
        self.now = 0.0  # arrival time of new sequences, in seconds
        self.computed_tokens = 0
        self.preempted: list[int] = []
        preempt = self.scheduler._preempt

        def noted(sequence: Sequence) -> None:
            self.preempted.append(sequence.handle)
            preempt(sequence)

        self.scheduler._preempt = noted  # type: ignore[method-assign]

    def generate(self, handle: int, request: Request) -> Sequence:
        sequence = Sequence(handle, request, Phase.WAITING, arrived_s=self.now)
        self.scheduler.add(sequence)
        return sequence

    def prefill(self, handle: int, request: Request) -> Sequence:
        sequence = Sequence(handle, request, Phase.WAITING, hold=True, arrived_s=self.now)
        self.scheduler.add(sequence)
        return sequence

    def receive(self, handle: int, request: Request) -> Sequence:
        sequence = Sequence(handle, request, Phase.LOOKED_UP, arrived_s=self.now)
        self.scheduler.look_up(sequence)
        self.scheduler.reserve(sequence)
        return sequence

    def step(self) -> StepPlan:
        step = self.scheduler.plan()
        drawing = [*step.decode, *(s for s, n in step.chunks if s.remaining == n)]
        for sequence in step.decode:
            assert len(sequence.tokens) <= len(sequence.pages) * BLOCK_TOKENS
            sequence.computed += 1
        for sequence, count in step.chunks:
            self.computed_tokens += count
            sequence.computed += count
            sequence.commit(self.manager)
        for sequence in drawing:
            self._advance(sequence)
        return step

    def _advance(self, sequence: Sequence) -> None:
        sequence.tokens.append(1000 + len(sequence.tokens))
        sequence.commit(self.manager)
        if sequence.hold:
            self.scheduler.hold(sequence)
        elif len(sequence.tokens) >= sequence.request.length_limit:
            self.scheduler.finish(sequence)
        elif sequence.phase is Phase.PREFILL:
            self.scheduler.promote(sequence)

    def drain(self, steps: int = 5000) -> int:
        """Until nothing is left to do; the number of steps."""
        for count in range(steps):
            if not self.step():
                return count
        raise AssertionError(f"not done after {steps} steps")
