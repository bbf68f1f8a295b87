"""Turns: who gets pages and rows, who gives them up, who waits for a prefix in flight."""

from __future__ import annotations

import statistics
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.scheduling.sequence import Phase, Sequence
from tests.engine.turns import Turns, wish

PROMPT = list(range(200))


# ---- prefixes in flight ---------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [48, 512])
def test_choices_of_one_prompt_compute_its_blocks_once(chunk: int) -> None:
    turns = Turns(pages=80, chunk=chunk)
    for handle in range(8):
        turns.generate(handle, wish(PROMPT))
    turns.drain()
    assert turns.computed_tokens == 200 + 7 * 8  # 6 full blocks once, the last 8 tokens by each


def test_a_prefix_is_waited_for_as_far_as_it_is_shared() -> None:
    turns = Turns(pages=80, chunk=32)
    first = turns.generate(0, wish(PROMPT))
    second = turns.generate(1, wish(PROMPT[:70] + [7] * 100))
    turns.step()
    assert (first.phase, second.phase) == (Phase.PREFILL, Phase.WAITING)
    turns.step()
    turns.step()
    # Its next block is nobody's: it starts, while the first one has not ended.
    assert (first.phase, second.phase) == (Phase.PREFILL, Phase.PREFILL)
    assert second.cached == 64


@pytest.mark.parametrize("how", ["dropped", "preempted"])
def test_nobody_waits_for_a_prefill_that_has_ended(how: str) -> None:
    turns = Turns(pages=80, chunk=32)
    first = turns.generate(0, wish(PROMPT))
    second = turns.generate(1, wish(PROMPT))
    turns.step()
    turns.step()
    if how == "dropped":
        turns.scheduler.finish(first)
    else:
        turns.scheduler._preempt(first)
    turns.step()
    assert (second if how == "dropped" else first).cached == 64
    turns.drain()
    assert turns.manager.available == 80


def test_a_held_prefill_gives_its_blocks_at_once() -> None:
    turns = Turns(pages=80, chunk=512)
    first = turns.prefill(0, wish(PROMPT))
    turns.step()
    assert first.phase is Phase.HELD
    second = turns.prefill(1, wish(PROMPT))
    turns.step()
    assert second.cached == 192


@pytest.mark.parametrize(("pages", "rows"), [(16, 8), (80, 3)])
def test_who_waits_for_a_prefix_is_passed_but_not_robbed(pages: int, rows: int) -> None:
    turns = Turns(pages, rows, chunk=32)
    turns.generate(0, wish(PROMPT))  # 7 pages
    waits = turns.generate(1, wish(PROMPT))  # 7 pages are kept for it, and a row
    passes = turns.generate(2, wish([5] * 40))  # 2 pages
    too_much = turns.generate(3, wish([6] * 60))
    turns.step()
    assert [s.phase for s in (waits, passes)] == [Phase.WAITING, Phase.PREFILL]
    assert too_much.phase is Phase.WAITING
    while waits.phase is Phase.WAITING:
        turns.step()
    assert waits.cached == 192
    turns.drain()


def test_an_urgent_one_does_not_wait_for_one_that_is_not() -> None:
    turns = Turns(pages=80, chunk=32)
    turns.generate(0, wish(PROMPT, priority=3))
    turns.step()
    urgent = turns.generate(1, wish(PROMPT, priority=-3))
    turns.step()
    assert urgent.phase is Phase.PREFILL and urgent.computed == 64  # what the other had computed


# ---- classes --------------------------------------------------------------------------------


def test_the_queue_goes_by_class_then_age() -> None:
    turns = Turns(pages=80, rows=1)
    for handle, priority in enumerate([0, 5, -5, 0, -5]):
        turns.generate(handle, wish([handle] * 5, priority=priority))
    ended = []
    while turns.scheduler.sequences:
        before = set(turns.scheduler.sequences)
        turns.step()
        ended += sorted(before - set(turns.scheduler.sequences))
    assert ended == [2, 4, 0, 3, 1]


def test_the_newest_of_the_least_urgent_class_makes_room() -> None:
    turns = Turns(pages=9, chunk=512)
    for handle, priority in enumerate([0, 3, 3, 0]):
        turns.generate(handle, wish([handle] * 60, max_tokens=60, priority=priority))  # 2, then 4
    turns.drain()
    assert turns.preempted[:2] == [2, 1]
    assert 0 not in turns.preempted


def test_who_waits_for_a_row_makes_room_before_an_older_one_that_runs() -> None:
    turns = Turns(pages=4, rows=1)
    turns.generate(0, wish([1] * 40, max_tokens=60))  # 2 pages, then 4
    received = turns.receive(1, wish([2] * 40))
    turns.step()
    turns.scheduler.join(received, 7)
    turns.drain()
    assert turns.preempted == [1]


@pytest.mark.parametrize("short", ["rows", "pages"])
def test_an_urgent_arrival_preempts_what_it_needs(short: str) -> None:
    turns = Turns(pages=8 if short == "pages" else 80, rows=4 if short == "rows" else 8)
    for handle in range(4):
        turns.generate(handle, wish([handle] * 40, max_tokens=20))
    turns.step()
    turns.step()
    same = turns.generate(4, wish([7] * 40))
    turns.step()
    assert same.phase is Phase.WAITING and not turns.preempted  # its own class it does not
    urgent = turns.generate(5, wish([8] * 40, priority=-1))
    turns.step()
    assert urgent.phase is not Phase.WAITING and turns.preempted == [3]
    turns.drain()


def test_nobody_is_preempted_in_vain() -> None:
    turns = Turns(pages=8, chunk=512)
    held = turns.prefill(0, wish([1] * 120))  # 4 pages that nobody can take
    turns.generate(1, wish([2] * 40, max_tokens=20, priority=5))
    turns.step()
    assert held.phase is Phase.HELD
    turns.generate(2, wish([3] * 150, priority=-5))  # 5 pages; 4 could be had
    turns.step()
    assert not turns.preempted


def test_nobody_is_preempted_for_a_row_that_it_does_not_have() -> None:
    turns = Turns(pages=80, rows=1)
    turns.generate(0, wish([1] * 40, max_tokens=30, priority=-1))
    received = turns.receive(1, wish([2] * 80, priority=5))
    turns.step()
    turns.scheduler.join(received, 7)
    turns.generate(2, wish([3] * 30, priority=-1))
    turns.step()
    assert not turns.preempted and received.pages


def test_pages_that_others_share_do_not_count_as_had() -> None:
    turns = Turns(pages=12, chunk=512)
    turns.generate(0, wish(PROMPT[:192] + [5] * 10, max_tokens=60, priority=-1))
    turns.step()
    for handle in (1, 2):
        turns.generate(handle, wish(PROMPT[:192] + [9 + handle] * 10, max_tokens=20, priority=5))
    turns.step()
    assert turns.manager.available == 3  # three sequences on 6 shared pages and one of their own
    turns.generate(3, wish([17] * 300, priority=-1))  # 10 pages: 5 could be had
    turns.step()
    assert not turns.preempted


def test_an_urgent_one_behind_a_waiting_one_preempts_as_well() -> None:
    turns = Turns(pages=80, rows=3, chunk=32)
    for handle in (0, 1):
        turns.generate(handle, wish([handle] * 20, max_tokens=60, priority=9))
    turns.step()
    turns.step()
    turns.generate(2, wish(PROMPT, priority=-1))
    turns.step()
    waiting = turns.generate(3, wish(PROMPT, priority=-1))  # for the prefix that 2 computes
    urgent = turns.generate(4, wish([7] * 10, priority=-1))
    turns.step()
    assert waiting.phase is Phase.WAITING
    # A row for it, and one that is kept for the one it passes.
    assert urgent.phase is not Phase.WAITING and turns.preempted == [1, 0]


def test_who_came_with_its_kv_does_not_start_when_it_comes_back() -> None:
    turns = Turns(pages=4, rows=2)
    received = turns.receive(1, wish([2] * 40, max_tokens=60))
    turns.step()
    turns.scheduler.join(received, 7)
    turns.generate(0, wish([1] * 30, max_tokens=60))
    started = []
    while turns.step():
        started += [s.handle for s in turns.scheduler.take_started()]
    assert 1 in turns.preempted and started == [0]


# ---- anything goes --------------------------------------------------------------------------

PAGES, ROWS = 14, 3
PROMPTS = [
    [1] * 5, [1] * 70, [1] * 64 + [2] * 40, [1] * 64 + [3] * 60, [4] * 130, list(range(96)),
]  # fmt: skip


class AnyTurn(RuleBasedStateMachine):
    """Requests of all kinds come and go in between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns(PAGES, ROWS, chunk=48)
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
        arrive = getattr(self.turns, kind)
        self.known.append(arrive(self.new(), wish(prompt, tokens, priority)))

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            first = min(self.running(), key=lambda s: s.order, default=None)
            done = None if first is None else (len(first.tokens), first.computed)
            self.turns.step()
            if first is not None and first.phase in (Phase.PREFILL, Phase.DECODE):
                urgent = [s for s in self.running() if s.order < first.order]
                assert urgent or (len(first.tokens), first.computed) != done

    def running(self) -> list[Sequence]:
        return [*self.turns.scheduler.prefilling, *self.turns.scheduler.decoding]

    @precondition(lambda self: self.turns.scheduler.sequences)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.turns.scheduler.sequences)))
        self.turns.scheduler.finish(self.turns.scheduler.sequences[handle])

    @rule()
    def hand_over(self) -> None:
        """What is held has been fetched, and what was to be received is there."""
        for sequence in list(self.turns.scheduler.sequences.values()):
            if sequence.phase is Phase.RECEIVING:
                self.turns.scheduler.join(sequence, 7)
            elif sequence.phase in (Phase.HELD, Phase.LOOKED_UP):  # served; or to be placed anew
                self.turns.scheduler.finish(sequence)

    @invariant()
    def pages_are_those_of_who_holds_them(self) -> None:
        refs = [0] * PAGES
        for sequence in self.turns.scheduler.sequences.values():
            for page in sequence.pages:
                refs[page] += 1
        assert self.turns.manager._refs == refs

    @invariant()
    def everybody_is_in_one_place(self) -> None:
        s = self.turns.scheduler
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
        assert not any(q.pages for q in self.turns.scheduler.queue)

    @invariant()
    def only_running_prefills_are_waited_for(self) -> None:
        owners = set(self.turns.scheduler._in_flight._owner.values())
        assert owners <= set(self.turns.scheduler.prefilling)

    def teardown(self) -> None:
        """Nobody starves: when nothing comes any more, all of them end."""
        for _ in range(3000):
            if not self.turns.scheduler.sequences:
                break
            self.turns.step()
            self.hand_over()
        assert not self.turns.scheduler.sequences
        assert self.turns.manager.available == PAGES


AnyTurn.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyTurn = AnyTurn.TestCase


# ---- cost -----------------------------------------------------------------------------------


def test_planning_costs_little_however_much_waits() -> None:
    """64 sequences decode, and 500 long prompts wait for pages."""
    turns = Turns(pages=64 * 10, rows=64, chunk=64 * 200)
    for handle in range(64):
        turns.generate(handle, wish([handle] * 200, max_tokens=120))
    turns.step()
    for handle in range(500):
        turns.generate(100 + handle, wish([handle] * 3000))
    seconds = []
    for _ in range(60):
        began = time.thread_time()
        turns.scheduler.plan()
        seconds.append(time.thread_time() - began)
        turns.step()
    assert len(turns.scheduler.decoding) == 64
    print(f"plan(): {statistics.median(seconds) * 1e6:.0f} us")
    assert min(seconds) < 200e-6  # 30 us where nothing else runs
