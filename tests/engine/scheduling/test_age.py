"""An attempt that is repeated keeps the place of its request: the oldest request always goes on."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from engine.scheduling.sequence import Phase, Sequence
from protocol.requests import Request
from tests.engine.scheduler_harness import SchedulerHarness, make_request

HOLDS_PAGES = (Phase.PREFILL, Phase.DECODE, Phase.RECEIVING, Phase.WAITING_ROW, Phase.HELD)
WAITS = (Phase.WAITING, Phase.RESERVING)


def distinct_prompt(seed: int, tokens: int = 60) -> list[int]:
    """Return a prompt that shares no prefix with another one."""
    return [1000 + seed] + [seed % 7 + 3] * (tokens - 1)


def test_retry_goes_ahead_of_requests_that_came_after_the_first_attempt() -> None:
    harness = SchedulerHarness(pages=6)
    harness.generate(0, make_request(distinct_prompt(0)))  # fills the pool
    harness.step()
    harness.now = 1.0
    first = harness.receive(1, make_request(distinct_prompt(1)))
    harness.now = 2.0
    for handle in (2, 3):
        harness.receive(handle, make_request(distinct_prompt(handle)))
    harness.now = 10.0
    harness.scheduler.finish(first)  # the attempt failed
    again = replace(make_request(distinct_prompt(1)), waited_s=9.0)
    retry = harness.receive(4, again)
    assert harness.scheduler.queue[0] is retry
    assert [s.handle for s in harness.scheduler.queue] == [4, 2, 3]


def test_equal_ages_go_by_handle() -> None:
    harness = SchedulerHarness(pages=6)
    for handle in (3, 1, 2):
        harness.generate(handle, make_request(distinct_prompt(handle)))
    assert [s.handle for s in harness.scheduler.queue] == [1, 2, 3]


def test_age_is_no_priority() -> None:
    harness = SchedulerHarness(pages=6)
    harness.now = 100.0
    harness.generate(1, replace(make_request(distinct_prompt(1)), waited_s=99.0))
    harness.generate(2, make_request(distinct_prompt(2), priority=-1))
    assert [s.handle for s in harness.scheduler.queue] == [2, 1]


def test_resumed_request_gives_up_its_pages_after_younger_ones() -> None:
    harness = SchedulerHarness(pages=5)
    harness.now = 5.0
    harness.generate(1, make_request(distinct_prompt(1, 30), max_tokens=90))
    harness.now = 6.0
    resumed = replace(make_request(distinct_prompt(2, 30), max_tokens=90), waited_s=4.0)
    harness.generate(2, resumed)
    while not harness.preempted:
        assert harness.step()
    assert harness.preempted == [1]


class RetriedRequests(RuleBasedStateMachine):
    """Requests arrive, and attempts fail and are repeated with a new handle, at random."""

    def __init__(self) -> None:
        super().__init__()
        self.harness = SchedulerHarness(pages=16, rows=3)
        self.handles = itertools.count(1)
        self.seeds = itertools.count()
        self.attempts: dict[Sequence, tuple[float, Request, str]] = {}  # arrival of the request

    def submit(self, arrived_s: float, request: Request, kind: str) -> None:
        aged = replace(request, waited_s=self.harness.now - arrived_s)
        sequence = getattr(self.harness, kind)(next(self.handles), aged)
        self.attempts[sequence] = arrived_s, request, kind

    @rule(kind=st.sampled_from(["generate", "prefill", "receive"]), tokens=st.integers(20, 90))
    def arrive(self, kind: str, tokens: int) -> None:
        request = make_request(distinct_prompt(next(self.seeds), tokens), max_tokens=20)
        self.submit(self.harness.now, request, kind)

    @rule(seconds=st.integers(1, 8))
    def wait(self, seconds: int) -> None:
        self.harness.now += seconds  # whole seconds, so that ages are exact

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        open_ = [s for s in self.attempts if s.phase in (*WAITS, *HOLDS_PAGES)]
        if open_:
            failed = data.draw(st.sampled_from(sorted(open_, key=lambda s: s.handle)))
            self.harness.scheduler.finish(failed)
            self.submit(*self.attempts.pop(failed))

    @rule()
    def step(self) -> None:
        waiting = [s for s in self.attempts if s.phase in WAITS]
        self.harness.step()
        admitted = [s for s in waiting if s.phase not in WAITS]
        kept = [s for s in waiting if s.phase in WAITS]
        for younger in admitted:
            assert all(self.place(younger) < self.place(older) for older in kept)
        self.hand_over()

    def place(self, sequence: Sequence) -> tuple[float, int]:
        """The order that is due: by the arrival of the request, then by handle."""
        return self.attempts[sequence][0], sequence.handle

    def hand_over(self) -> None:
        known = self.harness.scheduler.sequences
        for sequence in list(self.attempts):
            if sequence.phase is Phase.RECEIVING:
                self.harness.scheduler.join(sequence, 7)
            elif sequence.phase is Phase.HELD:
                self.harness.scheduler.finish(sequence)
            if sequence.handle not in known:
                del self.attempts[sequence]

    @invariant()
    def the_oldest_request_is_first(self) -> None:
        queue = [s for s in self.harness.scheduler.queue if s in self.attempts]
        assert queue == sorted(queue, key=lambda s: self.attempts.get(s, (s.order[1],))[0])

    def teardown(self) -> None:
        for _ in range(3000):
            if not self.attempts:
                break
            self.step()
        assert not self.attempts, "a request starves"


TestRetriedRequests = RetriedRequests.TestCase
