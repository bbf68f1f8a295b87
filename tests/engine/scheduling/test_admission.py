"""Admission: which sequences get pages and rows, are preempted, or wait for a prefix in flight."""

from __future__ import annotations

import statistics
import time

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.scheduling.sequence import Phase, Sequence
from tests.engine.scheduler_harness import SchedulerHarness, make_request

PROMPT = list(range(200))


# ---- prefixes in flight ---------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [48, 512])
def test_choices_of_one_prompt_compute_shared_blocks_once(chunk: int) -> None:
    harness = SchedulerHarness(pages=80, chunk=chunk)
    for handle in range(8):
        harness.generate(handle, make_request(PROMPT))
    harness.drain()
    assert harness.computed_tokens == 200 + 7 * 8  # 6 full blocks once, the last 8 tokens by each


def test_sequence_waits_only_for_the_shared_part_of_a_prefix_in_flight() -> None:
    harness = SchedulerHarness(pages=80, chunk=32)
    first = harness.generate(0, make_request(PROMPT))
    second = harness.generate(1, make_request(PROMPT[:70] + [7] * 100))
    harness.step()
    assert (first.phase, second.phase) == (Phase.PREFILL, Phase.WAITING)
    harness.step()
    harness.step()
    # Its next block is nobody's: it starts, while the first one has not ended.
    assert (first.phase, second.phase) == (Phase.PREFILL, Phase.PREFILL)
    assert second.cached == 64


@pytest.mark.parametrize("how", ["dropped", "preempted"])
def test_no_sequence_waits_for_a_prefill_that_has_ended(how: str) -> None:
    harness = SchedulerHarness(pages=80, chunk=32)
    first = harness.generate(0, make_request(PROMPT))
    second = harness.generate(1, make_request(PROMPT))
    harness.step()
    harness.step()
    if how == "dropped":
        harness.scheduler.finish(first)
    else:
        harness.scheduler._preempt(first)
    harness.step()
    assert (second if how == "dropped" else first).cached == 64
    harness.drain()
    assert harness.manager.available == 80


def test_held_prefill_shares_its_blocks_at_once() -> None:
    harness = SchedulerHarness(pages=80, chunk=512)
    first = harness.prefill(0, make_request(PROMPT))
    harness.step()
    assert first.phase is Phase.HELD
    second = harness.prefill(1, make_request(PROMPT))
    harness.step()
    assert second.cached == 192


@pytest.mark.parametrize(("pages", "rows"), [(16, 8), (80, 3)])
def test_sequence_waiting_for_a_prefix_is_overtaken_but_keeps_its_pages(
    pages: int, rows: int
) -> None:
    harness = SchedulerHarness(pages, rows, chunk=32)
    harness.generate(0, make_request(PROMPT))  # 7 pages
    waits = harness.generate(1, make_request(PROMPT))  # 7 pages are kept for it, and a row
    passes = harness.generate(2, make_request([5] * 40))  # 2 pages
    too_much = harness.generate(3, make_request([6] * 60))
    harness.step()
    assert [s.phase for s in (waits, passes)] == [Phase.WAITING, Phase.PREFILL]
    assert too_much.phase is Phase.WAITING
    while waits.phase is Phase.WAITING:
        harness.step()
    assert waits.cached == 192
    harness.drain()


def test_urgent_sequence_does_not_wait_for_a_less_urgent_prefill() -> None:
    harness = SchedulerHarness(pages=80, chunk=32)
    harness.generate(0, make_request(PROMPT, priority=3))
    harness.step()
    urgent = harness.generate(1, make_request(PROMPT, priority=-3))
    harness.step()
    assert urgent.phase is Phase.PREFILL and urgent.computed == 64  # what the other had computed


# ---- classes --------------------------------------------------------------------------------


def test_queue_is_ordered_by_class_then_age() -> None:
    harness = SchedulerHarness(pages=80, rows=1)
    for handle, priority in enumerate([0, 5, -5, 0, -5]):
        harness.generate(handle, make_request([handle] * 5, priority=priority))
    ended = []
    while harness.scheduler.sequences:
        before = set(harness.scheduler.sequences)
        harness.step()
        ended += sorted(before - set(harness.scheduler.sequences))
    assert ended == [2, 4, 0, 3, 1]


def test_newest_sequence_of_the_least_urgent_class_is_preempted() -> None:
    harness = SchedulerHarness(pages=9, chunk=512)
    for handle, priority in enumerate([0, 3, 3, 0]):
        harness.generate(
            handle, make_request([handle] * 60, max_tokens=60, priority=priority)
        )  # 2, then 4
    harness.drain()
    assert harness.preempted[:2] == [2, 1]
    assert 0 not in harness.preempted


def test_sequence_waiting_for_a_row_is_preempted_before_an_older_running_one() -> None:
    harness = SchedulerHarness(pages=4, rows=1)
    harness.generate(0, make_request([1] * 40, max_tokens=60))  # 2 pages, then 4
    received = harness.receive(1, make_request([2] * 40))
    harness.step()
    harness.scheduler.join(received, 7)
    harness.drain()
    assert harness.preempted == [1]


@pytest.mark.parametrize("short", ["rows", "pages"])
def test_urgent_arrival_preempts_only_what_it_needs(short: str) -> None:
    harness = SchedulerHarness(
        pages=8 if short == "pages" else 80, rows=4 if short == "rows" else 8
    )
    for handle in range(4):
        harness.generate(handle, make_request([handle] * 40, max_tokens=20))
    harness.step()
    harness.step()
    same = harness.generate(4, make_request([7] * 40))
    harness.step()
    assert same.phase is Phase.WAITING and not harness.preempted  # its own class it does not
    urgent = harness.generate(5, make_request([8] * 40, priority=-1))
    harness.step()
    assert urgent.phase is not Phase.WAITING and harness.preempted == [3]
    harness.drain()


def test_no_sequence_is_preempted_if_the_arrival_would_not_fit() -> None:
    harness = SchedulerHarness(pages=8, chunk=512)
    held = harness.prefill(0, make_request([1] * 120))  # 4 pages that nobody can take
    harness.generate(1, make_request([2] * 40, max_tokens=20, priority=5))
    harness.step()
    assert held.phase is Phase.HELD
    harness.generate(2, make_request([3] * 150, priority=-5))  # 5 pages; 4 could be had
    harness.step()
    assert not harness.preempted


def test_only_sequences_with_a_row_are_preempted_for_a_row() -> None:
    harness = SchedulerHarness(pages=80, rows=1)
    harness.generate(0, make_request([1] * 40, max_tokens=30, priority=-1))
    received = harness.receive(1, make_request([2] * 80, priority=5))
    harness.step()
    harness.scheduler.join(received, 7)
    harness.generate(2, make_request([3] * 30, priority=-1))
    harness.step()
    assert not harness.preempted and received.pages


def test_shared_pages_do_not_count_as_freed_by_a_preemption() -> None:
    harness = SchedulerHarness(pages=12, chunk=512)
    harness.generate(0, make_request(PROMPT[:192] + [5] * 10, max_tokens=60, priority=-1))
    harness.step()
    for handle in (1, 2):
        harness.generate(
            handle, make_request(PROMPT[:192] + [9 + handle] * 10, max_tokens=20, priority=5)
        )
    harness.step()
    assert harness.manager.available == 3  # three sequences on 6 shared pages and one of their own
    harness.generate(3, make_request([17] * 300, priority=-1))  # 10 pages: 5 could be had
    harness.step()
    assert not harness.preempted


def test_urgent_sequence_behind_a_waiting_one_preempts() -> None:
    harness = SchedulerHarness(pages=80, rows=3, chunk=32)
    for handle in (0, 1):
        harness.generate(handle, make_request([handle] * 20, max_tokens=60, priority=9))
    harness.step()
    harness.step()
    harness.generate(2, make_request(PROMPT, priority=-1))
    harness.step()
    waiting = harness.generate(
        3, make_request(PROMPT, priority=-1)
    )  # for the prefix that 2 computes
    urgent = harness.generate(4, make_request([7] * 10, priority=-1))
    harness.step()
    assert waiting.phase is Phase.WAITING
    # A row for it, and one that is kept for the one it passes.
    assert urgent.phase is not Phase.WAITING and harness.preempted == [1, 0]


def test_received_sequence_does_not_start_again_after_a_preemption() -> None:
    harness = SchedulerHarness(pages=4, rows=2)
    received = harness.receive(1, make_request([2] * 40, max_tokens=60))
    harness.step()
    harness.scheduler.join(received, 7)
    harness.generate(0, make_request([1] * 30, max_tokens=60))
    started = []
    while harness.step():
        started += [s.handle for s in harness.scheduler.take_started()]
    assert 1 in harness.preempted and started == [0]


# ---- anything goes --------------------------------------------------------------------------

PAGES, ROWS = 14, 3
PROMPTS = [
    [1] * 5, [1] * 70, [1] * 64 + [2] * 40, [1] * 64 + [3] * 60, [4] * 130, list(range(96)),
]  # fmt: skip


class RandomOperations(RuleBasedStateMachine):
    """Requests of all kinds come and go in between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.harness = SchedulerHarness(PAGES, ROWS, chunk=48)
        self.handles = 0
        self.known: list[Sequence] = []

    def new(self) -> int:
        self.handles += 1
        return self.handles

    @rule(
        kind=st.sampled_from(["generate", "generate", "prefill", "receive"]),
        prompt=st.sampled_from(PROMPTS),
        tokens=st.integers(2, 70),
        priority=st.sampled_from([0, 0, -1, 1]),
    )
    def arrive(self, kind: str, prompt: list[int], tokens: int, priority: int) -> None:
        arrive = getattr(self.harness, kind)
        self.known.append(arrive(self.new(), make_request(prompt, tokens, priority)))

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            first = min(self.running(), key=lambda s: s.order, default=None)
            done = None if first is None else (len(first.tokens), first.computed)
            self.harness.step()
            if first is not None and first.phase in (Phase.PREFILL, Phase.DECODE):
                urgent = [s for s in self.running() if s.order < first.order]
                assert urgent or (len(first.tokens), first.computed) != done

    def running(self) -> list[Sequence]:
        return [*self.harness.scheduler.prefilling, *self.harness.scheduler.decoding]

    @precondition(lambda self: self.harness.scheduler.sequences)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.harness.scheduler.sequences)))
        self.harness.scheduler.finish(self.harness.scheduler.sequences[handle])

    @rule()
    def hand_over(self) -> None:
        """What is held has been fetched, and what was to be received is there."""
        for sequence in list(self.harness.scheduler.sequences.values()):
            if sequence.phase is Phase.RECEIVING:
                self.harness.scheduler.join(sequence, 7)
            elif sequence.phase in (Phase.HELD, Phase.LOOKED_UP):  # served; or to be placed anew
                self.harness.scheduler.finish(sequence)

    @invariant()
    def pages_are_those_of_who_holds_them(self) -> None:
        refs = [0] * PAGES
        for sequence in self.harness.scheduler.sequences.values():
            for page in sequence.pages:
                refs[page] += 1
        assert self.harness.manager._refs == refs

    @invariant()
    def everybody_is_in_one_place(self) -> None:
        s = self.harness.scheduler
        places = {
            Phase.WAITING: s.queue,
            Phase.RESERVING: s.queue,
            Phase.PREFILL: s.prefilling,
            Phase.DECODE: s.decoding,
            Phase.WAITING_ROW: s.joining,
        }
        for sequence in s.sequences.values():
            for queue in (s.queue, s.prefilling, s.decoding, s.joining):
                assert (sequence in queue) == (queue is places.get(sequence.phase))
        for queue in (s.queue, s.prefilling, s.joining):
            assert queue == sorted(queue, key=lambda q: q.order)
        rows = [q.row for q in self.running()]
        assert sorted(rows + s._rows) == list(range(ROWS))

    @invariant()
    def who_waits_holds_nothing(self) -> None:
        assert not any(q.pages for q in self.harness.scheduler.queue)

    @invariant()
    def only_running_prefills_are_waited_for(self) -> None:
        owners = set(self.harness.scheduler._in_flight._owner.values())
        assert owners <= set(self.harness.scheduler.prefilling)

    def teardown(self) -> None:
        """Nobody starves: when nothing comes any more, all of them end."""
        for _ in range(3000):
            if not self.harness.scheduler.sequences:
                break
            self.harness.step()
            self.hand_over()
        assert not self.harness.scheduler.sequences
        assert self.harness.manager.available == PAGES


TestRandomOperations = RandomOperations.TestCase


# ---- cost -----------------------------------------------------------------------------------


def test_planning_time_does_not_grow_with_the_queue() -> None:
    """64 sequences decode, and 500 long prompts wait for pages."""
    harness = SchedulerHarness(pages=64 * 10, rows=64, chunk=64 * 200)
    for handle in range(64):
        harness.generate(handle, make_request([handle] * 200, max_tokens=120))
    harness.step()
    for handle in range(500):
        harness.generate(100 + handle, make_request([handle] * 3000))
    seconds = []
    for _ in range(60):
        began = time.thread_time()
        harness.scheduler.plan()
        seconds.append(time.thread_time() - began)
        harness.step()
    assert len(harness.scheduler.decoding) == 64
    print(f"plan(): {statistics.median(seconds) * 1e6:.0f} us")
    assert min(seconds) < 200e-6  # 30 us where nothing else runs
