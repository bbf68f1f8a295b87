"""A simulated prefill worker computes the oldest prompt first, as the engine does."""

from __future__ import annotations

import pytest

from cluster.simulator.devices.batch import DraftPace
from cluster.simulator.devices.cache import CACHE_BLOCK_TOKENS
from cluster.simulator.devices.clock import SimulatedClock
from cluster.simulator.devices.request import SimulatedRequest
from cluster.simulator.devices.worker import SimulatedWorker
from cluster.sizing.snapshot import MachineModel
from protocol.performance.step_model import StepModel
from router.placement.prefix_index import PrefixIndex
from router.placement.snapshot import Objectives

STEP_S = 1.0
CHUNK = CACHE_BLOCK_TOKENS


class Listener:
    """Knows when each prompt was computed."""

    def __init__(self, clock: SimulatedClock) -> None:
        self.computed: dict[SimulatedRequest, float] = {}
        self._clock = clock

    def on_computed(self, request: SimulatedRequest) -> None:
        self.computed[request] = self._clock.now

    def on_started(self, request: SimulatedRequest) -> None: ...
    def on_reserved(self, request: SimulatedRequest) -> None: ...
    def on_preempted(self, request: SimulatedRequest, given: int) -> None: ...
    def on_idle(self, worker: SimulatedWorker) -> None: ...
    def on_finished(self, request: SimulatedRequest) -> None: ...


class Prefill:
    """One worker, whose steps take a second whatever they compute."""

    def __init__(self, kv_tokens: int = 100 * CHUNK) -> None:
        machine = MachineModel(
            step=(STEP_S, 0.0, 0.0, 0.0, 0.0), chunk=CHUNK, max_batch=8, kv_tokens=kv_tokens,
            kv_bytes=1.0,
        )  # fmt: skip
        self.clock = SimulatedClock()
        self.listener = Listener(self.clock)
        drafts = DraftPace(StepModel(*machine.step), None)
        self.worker = SimulatedWorker(
            *(0, "prefill", machine, self.clock, self.listener, PrefixIndex(), drafts),
            Objectives(1.0, 0.1),
        )

    def submit_at(self, when: float, request: SimulatedRequest) -> SimulatedRequest:
        self.clock.at(when, self.worker.submit, request)
        return request

    def run(self) -> dict[SimulatedRequest, float]:
        while self.clock.step():
            pass
        return self.listener.computed


def prompt(number: int, chunks: float, blocks: tuple[bytes, ...] = ()) -> SimulatedRequest:
    """Of so many chunks; the number is its age, too."""
    return SimulatedRequest(number, float(number), round(chunks * CHUNK), 2, blocks)


@pytest.mark.parametrize("late_s", [2.0, 2.5])
def test_older_prompt_is_computed_at_the_next_chunk(late_s: float) -> None:
    prefill = Prefill()
    long = prefill.submit_at(0.0, prompt(1, 10))
    older = prefill.submit_at(late_s, prompt(0, 2))
    younger = prefill.submit_at(late_s, prompt(2, 0.5))
    computed = prefill.run()
    begins = 2.0 if late_s == 2.0 else 3.0
    assert computed == {older: begins + 2, long: 12.0, younger: 13.0}
    assert prefill.worker.computed_prompts == (13.0, round(12.5 * CHUNK))


def test_dropped_prompt_takes_no_further_chunk() -> None:
    """Its client is gone, or its decode worker: the engine ends the step that runs."""
    prefill = Prefill()
    long = prefill.submit_at(0.0, prompt(0, 10))
    next_one = prefill.submit_at(1.0, prompt(1, 2))
    prefill.clock.at(2.5, prefill.worker.drop, long)
    assert prefill.run() == {next_one: 5.0}
    assert prefill.worker.computed_prompts == (5.0, 5 * CHUNK)


def test_older_prompt_waits_for_its_prefix_no_longer_than_that_is_computed() -> None:
    blocks = tuple(bytes([n]) for n in range(10))
    prefill = Prefill()
    long = prefill.submit_at(0.0, prompt(1, 10, blocks))
    older = prefill.submit_at(0.5, prompt(0, 4.5, blocks[:4]))
    computed = prefill.run()
    assert computed[older] == 5.0 and older.cached == 4 * CHUNK
    assert computed[long] == 11.0


def test_prompt_without_room_waits_while_the_younger_one_goes_on() -> None:
    prefill = Prefill(kv_tokens=11 * CHUNK)
    long = prefill.submit_at(0.0, prompt(1, 10))
    older = prefill.submit_at(0.5, prompt(0, 2))
    prefill.clock.at(10.5, prefill.worker.release, long)
    assert prefill.run() == {long: 10.0, older: 12.5}
