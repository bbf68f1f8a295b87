"""The books: whatever happens to requests, in whatever order, all is forgotten exactly once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.process.untaken_prompts import UntakenPrompts
from protocol.wire import wire_pb2 as pb
from router.placement.ledger import (
    MOST_NAMED,
    REPORT_WINDOW,
    PlacementTicket,
    PromptQueue,
    QueuedPrompts,
    WorkLedger,
)
from router.placement.unreported_prompts import UNREPORTED_S

WORKERS = st.sampled_from(["a", "b", "c"])


class _Open:
    """A ticket beside what a naive model knows of it."""

    def __init__(
        self, ticket: PlacementTicket, prefill: str | None, decode: str, size: int
    ) -> None:
        self.ticket = ticket
        self.computing = prefill or decode
        self.link = (prefill, decode)
        self.size = size
        self.phase = "placed"
        self.reported = False  # by its decode worker, which counts its KV then


class Books(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ledger = WorkLedger(lambda: self.now)
        self.tickets: list[_Open] = []

    @rule(
        prefill=st.none() | WORKERS,
        decode=WORKERS,
        size=st.integers(0, 9),
        level=st.integers(-2, 2),
    )
    def place(self, prefill: str | None, decode: str, size: int, level: int) -> None:
        ticket = self.ledger.open(
            *(prefill, decode), tokens=size, seconds=size / 10, kv_tokens=size, priority=level
        )
        self.tickets.append(_Open(ticket, prefill, decode, size))

    @rule(data=st.data())
    def tokens_came(self, data: st.DataObject) -> None:
        if not self.tickets:
            return
        it = data.draw(st.sampled_from(self.tickets))
        it.ticket.on_tokens()
        if it.phase == "placed":
            it.phase = "receiving" if it.link[0] else "decoding"
        elif it.phase == "receiving":
            it.phase = "decoding"

    @rule(data=st.data(), times=st.integers(1, 3))
    def release(self, data: st.DataObject, times: int) -> None:
        if not self.tickets:
            return
        it = data.draw(st.sampled_from(self.tickets))
        for _ in range(times):
            it.ticket.release()
        it.phase = "released"

    @rule(worker=WORKERS, tokens=st.integers(0, 30))
    def report(self, worker: str, tokens: int) -> None:
        self.ledger.report(worker, tokens)
        for it in self.tickets:
            it.reported |= it.link[1] == worker

    @rule(worker=WORKERS)
    def worker_leaves(self, worker: str) -> None:
        self.ledger.forget(worker)

    @rule(seconds=st.floats(0, 5))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def counts_are_those_of_the_open_requests(self) -> None:
        placed = [it for it in self.tickets if it.phase == "placed"]
        tokens: Counter[str] = Counter()
        room: Counter[str] = Counter()
        for it in placed:
            tokens[it.computing] += it.size
            room[it.link[1]] += 0 if it.reported else it.size
        moving = Counter(it.link for it in self.tickets if it.phase == "receiving")
        assert +Counter({i: q.tokens for i, q in self.ledger.queues.items()}) == +tokens
        assert +self.ledger.pending_kv == +room
        assert dict(self.ledger.active) == dict(moving)
        for instance, queue in self.ledger.queues.items():
            due = sum(it.size / 10 for it in placed if it.computing == instance)
            assert -1e-9 <= queue.seconds(2) <= due + 1e-9
            assert queue.seconds(-2) <= queue.seconds(2) + 1e-9

    def teardown(self) -> None:
        for it in self.tickets:
            it.ticket.release()
        for worker in ("a", "b", "c"):
            self.ledger.forget(worker)
        assert not self.ledger.queues
        assert not self.ledger.pending_kv and not self.ledger._unreported
        assert not self.ledger.active


TestBooks = Books.TestCase


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_queue_shortens_while_the_first_is_computed() -> None:
    clock = Clock()
    queue = PromptQueue(clock)
    queue.add(10, 1.0, 0)
    queue.add(10, 1.0, 0)
    assert queue.seconds(0) == pytest.approx(2.0)
    clock.now += 0.4
    assert queue.seconds(0) == pytest.approx(1.6)
    clock.now += 60
    assert queue.seconds(0) == pytest.approx(1.0), "it is late; the second has not begun"
    queue.remove(10, 1.0, 0)
    assert queue.seconds(0) == pytest.approx(1.0)
    queue.remove(10, 1.0, 0)
    assert queue.seconds(0) == 0.0


def test_less_urgent_work_is_not_ahead() -> None:
    queue = PromptQueue(Clock())
    queue.add(10, 1.0, 0)
    queue.add(10, 4.0, 50)
    assert queue.seconds(0) == pytest.approx(1.0)
    assert queue.seconds(50) == pytest.approx(5.0)
    assert queue.seconds(-1) == 0.0


def test_kv_that_a_worker_has_promised_counts_once() -> None:
    """The ledger counts it until the worker's next report, which does from then on."""
    ledger = WorkLedger(Clock())
    tickets = []
    for _ in range(2):
        tickets.append(ledger.open("p", "d", tokens=100, seconds=1.0, kv_tokens=150, priority=0))
        assert ledger.pending_kv["d"] == 150
        ledger.report("p", 100)
        assert ledger.pending_kv["d"] == 150, "only the decode worker's report counts its KV"
        ledger.report("d", 0)
        assert ledger.pending_kv["d"] == 0
    for ticket in tickets:
        ticket.release()
    assert not ledger.pending_kv


def test_own_work_in_a_report_is_not_somebody_elses() -> None:
    queue = PromptQueue(Clock())
    queue.add(100, 1.0, 0)
    queue.report(100)
    assert queue.others == 0
    queue.remove(100, 1.0, 0)
    queue.report(100)
    assert queue.others == 0, "the report may be older than the answer"
    for _ in range(REPORT_WINDOW):
        queue.report(70)
    assert queue.others == 70
    queue.report(0)
    assert queue.others == 0


def test_a_queue_of_others_that_does_not_move_stays() -> None:
    """A worker whose prompts wait for pages reports the same tokens again and again."""
    clock = Clock()
    queue = PromptQueue(clock)
    for _ in range(10):
        queue.report(10_000)
        clock.now += 0.5
    assert queue.seconds(0, 2.0, 1.0) == pytest.approx(1.5), (
        "computed since the last report, at most"
    )
    assert queue.seconds(0, 2.0, 0.1) == pytest.approx(1.9), "a step, after which it would report"
    queue.report(10_000)
    for _ in range(4):
        clock.now += 0.1
        queue.report(10_000)
    assert queue.seconds(0, 2.0, 1.0) == pytest.approx(1.6), "the same count again"


def test_what_is_computed_of_an_own_prompt_hides_nothing_of_others() -> None:
    ledger = WorkLedger(Clock())
    ledger.open("p", "d", tokens=3000, seconds=1.0, kv_tokens=3100, priority=0)
    ledger.report("p", 500 + 1000, 2, 2500)  # 500 of its own are left, and 1000 of another router
    queue = ledger.queue("p")
    assert queue.other_prompts == 1
    assert queue.others == 1000 * 1500 // 4000
    ledger.report("p", 500, 1, 2500)
    assert queue.others == 0


def test_prompts_of_other_routers_are_what_a_report_has_beside_own_ones() -> None:
    ledger = WorkLedger(Clock())
    ticket = ledger.open("p", "d", tokens=100, seconds=1.0, kv_tokens=150, priority=0)
    ledger.report("p", 2100, 21)
    queue = ledger.queue("p")
    assert (queue.others, queue.other_prompts) == (2000, 20)
    ticket.release()
    ledger.report("p", 2000, 20)
    assert (queue.others, queue.other_prompts) == (1900, 19), "the report may be older"
    for _ in range(REPORT_WINDOW):
        ledger.report("p", 2000, 0)
    assert (queue.others, queue.other_prompts) == (2000, 1), "unknown: a single one"
    ledger.report("p", 0, 5)
    assert (queue.others, queue.other_prompts) == (0, 0)


def test_kv_of_attempts_that_a_report_does_not_contain_stays_promised() -> None:
    ledger = WorkLedger(lambda: 0.0)
    for kv_tokens in (1, 10, 100):
        ledger.open("p", "d", tokens=1, seconds=0.1, kv_tokens=kv_tokens, priority=0)
    ledger.report("d", 0, unseen=2)
    assert ledger.pending_kv["d"] == 110
    ledger.report("d", 0, unseen=1)
    assert ledger.pending_kv["d"] == 100
    ledger.report("d", 0)
    assert not ledger.pending_kv and not ledger._unreported


def test_an_announced_prompt_counts_until_it_is_reported() -> None:
    clock = Clock()
    ledger = WorkLedger(clock)
    ledger.announce("p", 1, 500)
    assert not ledger.queues, "a worker that is not known"
    ledger.report("p", 0)
    queue = ledger.queue("p")
    for digest in (1, 2):
        ledger.announce("p", digest, 500)
    assert (queue.others, queue.other_prompts) == (1000, 2)
    assert queue.seconds(0, 2.0, 1.0) == pytest.approx(2.0)
    clock.now += 0.1
    assert queue.seconds(0, 2.0, 1.0) == pytest.approx(1.9), "the worker has begun with the first"
    ledger.report("p", 450, 1, 50, latest=[1])
    assert (queue.others, queue.other_prompts) == (450 + 500, 2)
    ledger.report("p", 900, 2, latest=[1, 2])
    assert (queue.others, queue.other_prompts) == (900, 2)
    ledger.announce("p", 2, 500)
    assert queue.others == 900, "it comes after the report that contains it"
    ledger.announce("p", 3, 500)
    ledger.forget("p")
    assert not ledger.queues


def test_an_announced_prompt_that_does_not_come_is_forgotten() -> None:
    clock = Clock()
    ledger = WorkLedger(clock)
    ledger.report("p", 0)
    ledger.announce("p", 1, 500)
    clock.now += UNREPORTED_S - 0.01
    ledger.announce("p", 2, 50)
    assert ledger.queue("p").others == 550
    clock.now += 0.02
    assert ledger.queue("p").others == 50


def test_a_worker_that_names_no_prompts_has_all_of_them() -> None:
    ledger = WorkLedger(Clock())
    ledger.report("p", 0)
    ledger.announce("p", 1, 500)
    ledger.report("p", 0, latest=[])
    assert ledger.queue("p").others == 500, "it names them, and has had none"
    ledger.report("p", 500, 1)
    assert (ledger.queue("p").others, ledger.queue("p").other_prompts) == (500, 1)


@pytest.mark.parametrize("prompts", [8, 64, 300])
def test_a_burst_of_own_prompts_is_no_work_of_other_routers(prompts: int) -> None:
    """All of them come to the worker before its next load."""
    clock = Clock()
    ledger, untaken = WorkLedger(clock), UntakenPrompts(clock)
    ledger.report("p", 0, latest=())
    for digest in range(1, 1 + prompts):
        terms = {"tokens": 600, "seconds": 0.1, "kv_tokens": 0, "priority": 0.0, "digest": digest}
        ledger.open("p", "d", **terms)  # type: ignore[arg-type]
        untaken.add(600, digest)
    load = pb.Load(
        queued_tokens=untaken.tokens,
        queued_prompts=untaken.prompts,
        latest_prompts=untaken.latest.digests(),
        names_prompts=True,
    )
    ledger.report("p", *QueuedPrompts.of(load))
    assert (ledger.queue("p").others, ledger.queue("p").other_prompts) == (0, 0)


def test_own_work_that_a_report_does_not_contain_hides_nothing_of_others() -> None:
    ledger = WorkLedger(Clock())
    about = {"seconds": 1.0, "kv_tokens": 0, "priority": 0.0}
    for digest in (1, 2):
        ledger.open("p", "d", tokens=1000, digest=digest, **about)  # type: ignore[arg-type]
    queue = ledger.queue("p")
    ledger.report("p", 1700, 2, latest=[1])  # one of these two, and one of another router
    assert (queue.others, queue.other_prompts) == (700, 1)
    assert queue.tokens == 2000
    for _ in range(REPORT_WINDOW):
        ledger.report("p", 2700, 3, latest=[1, 2])
    assert (queue.others, queue.other_prompts) == (700, 1)


def test_what_is_computed_is_taken_from_the_queue_once() -> None:
    """One prompt is in progress, be it this router's or another one's."""
    clock = Clock()
    queue = PromptQueue(clock)
    queue.add(10, 1.0, 0)
    queue.report(20, 2)
    clock.now += 0.25
    assert queue.seconds(0, 1.0, 0.5) == pytest.approx(1.75)
    clock.now += 60
    assert queue.seconds(0, 1.0, 0.5) == pytest.approx(1.0), "the own one is almost done"


def test_a_few_tokens_of_others_do_not_hide_how_far_an_own_prompt_is() -> None:
    clock = Clock()
    ledger = WorkLedger(clock)
    ledger.open("p", "d", tokens=32_000, seconds=2.0, kv_tokens=0, priority=0, digest=1)
    ledger.report("p", 32_000, 1, latest=[1])
    clock.now += 1.9
    ledger.announce("p", 2, 16)
    assert ledger.queue("p").seconds(0, 0.001, 0.1) == pytest.approx(0.101)


def test_of_a_load_that_names_many_prompts_the_last_are_taken() -> None:
    load = pb.Load(queued_tokens=5, latest_prompts=range(1, 10_000), names_prompts=True)
    named = QueuedPrompts.of(load).latest
    assert named is not None and list(named) == list(range(10_000 - MOST_NAMED, 10_000))
    assert QueuedPrompts.of(pb.Load(names_prompts=True)).latest == ()
    assert QueuedPrompts.of(pb.Load(queued_tokens=5)).latest is None
