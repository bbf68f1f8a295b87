"""The benchmark of scaling: its traffic, and what it makes of a run."""

from __future__ import annotations

import pytest

from bench.autoscale_figures import Look, acts_after, figures, good_after, worker_seconds
from bench.autoscale_looks import looks, took
from bench.autoscale_phases import MOVING, Phase, Span, arrivals, shortened, spans
from bench.autoscale_screen import best, met
from bench.open_loop import Answer, Objective
from cluster.settings import Role
from cluster.sizing.decision import Decision, Loan, Record
from cluster.sizing.snapshot import Counts, Goals, Limits, Memory, Snapshot, State, Worker

GOAL = Objective(2.0, 0.1)
TWO = (Phase("prompts", 10.0, 5.0, 600, 12), Phase("answers", 20.0, 2.0, 100, 80, 0.3))


def answer(at: float, ttft: float = 1.0, tpot: float = 0.05, status: int = 200) -> Answer:
    return Answer(at, status, ttft + 10 * tpot, ttft, tpot)


def worker(name: str, home: Role, role: Role, state: State = "serving") -> Worker:
    return Worker(instance=name, home=home, role=role, state=state)


def record(
    at: float,
    workers: tuple[Worker, ...],
    before: tuple[int, int],
    after: tuple[int, int],
    loans: tuple[Loan, ...] = (),
    *,
    acted: bool = True,
) -> Record:
    asked = [Counts(prefill=p, decode=d) for p, d in (before, after)]
    many = Counts(prefill=9, decode=9)
    snapshot = Snapshot(
        at_s=at,
        mix=None,
        goals=Goals(ttft_s=2.0, tpot_s=0.1),
        machines={},
        workers=workers,
        targets=asked[0],
        limits=Limits(least=Counts(prefill=1, decode=1), most=many),
    )
    decision = Decision(
        wanted=asked[1],
        targets=asked[1],
        reason="demand",
        text="",
        memory=Memory(),
        loans=loans,
    )
    return Record(run="r", number=1, time_s=0.0, acted=acted, snapshot=snapshot, decision=decision)


def test_arrivals_are_as_the_phases_say_and_the_same_for_a_seed() -> None:
    found = arrivals(TWO, 7)
    assert found == arrivals(TWO, 7) != arrivals(TWO, 8)
    assert [a.at for a in found] == sorted(a.at for a in found)
    first = [a for a in found if a.at < 10.0]
    assert len(first) == pytest.approx(50, abs=20)
    assert all(300 <= len(a.prompt) <= 900 and 6 <= a.output <= 18 for a in first)
    assert all(50 <= len(a.prompt) <= 150 for a in found if a.at >= 10.0)
    assert max(a.at for a in found) < 30.0


def test_phases_lie_one_after_the_other() -> None:
    assert spans(TWO) == [Span("prompts", 0.0, 10.0), Span("answers", 10.0, 30.0)]
    short = shortened(MOVING, 0.2)
    assert spans(short)[-1].end == pytest.approx(0.2 * spans(MOVING)[-1].end)
    assert [p.rate for p in short] == [p.rate for p in MOVING]


def test_what_failed_or_was_refused_meets_nothing_and_workers_are_paid_by_the_second() -> None:
    answers = [
        answer(0.0),
        answer(1.0, ttft=3.0),
        answer(2.0, tpot=0.2),
        answer(3.0, status=429),
        answer(4.0, status=0),
        answer(99.0),
    ]
    seen = [Look(-1.0, 2, 1, 1), Look(5.0, 4, 1, 1), Look(8.0, 3, 1, 2)]
    of = figures(answers, seen, Span("all", 0.0, 10.0), GOAL)
    assert (of.requests, of.ttft, of.tpot, of.both) == (5, 0.4, 0.4, 0.2)
    assert (of.failed, of.refused) == (0.2, 0.2)
    assert of.worker_seconds == 5 * 2 + 3 * 4 + 2 * 3
    assert of.mean_workers == 2.8
    assert of.goodput == 0.1
    assert of.per_worker_second == pytest.approx(1 / 28)
    assert worker_seconds(seen, Span("part", 6.0, 9.0)) == 2 * 4 + 3


def test_time_to_react() -> None:
    span = Span("two", 10.0, 40.0)
    seen = [Look(0.0, 2, 1, 1), Look(9.0, 2, 1, 1), Look(13.0, 3, 1, 1), Look(16.0, 3, 2, 1)]
    assert acts_after(seen, span) == 6.0
    assert acts_after(seen[:3], span) is None
    late = [answer(10.0 + i, ttft=5.0 if i < 7 else 1.0) for i in range(30)]
    assert good_after(late, span, GOAL) == 10.0
    assert good_after([answer(10.0 + i) for i in range(30)], span, GOAL) == 0.0
    assert good_after([answer(10.0 + i, ttft=9.0) for i in range(30)], span, GOAL) is None


def test_looks_count_who_is_asked_for_and_who_still_leaves() -> None:
    a, b = worker("a", "prefill", "prefill"), worker("b", "decode", "decode")
    gone = worker("c", "decode", "decode", "leaving")
    found = looks(
        [record(100.0, (a, b), (1, 1), (1, 3)), record(103.0, (a, b, gone), (1, 1), (1, 1))], 90.0
    )
    assert found == [Look(10.0, 4, 1, 1), Look(13.0, 3, 1, 1)]
    advised = record(100.0, (a, b), (1, 1), (1, 3), acted=False)
    assert looks([advised], 90.0)[0].paid == 2


def test_loans_and_starts_take_from_the_decision_until_they_serve() -> None:
    a, b = worker("a", "prefill", "prefill"), worker("b", "decode", "decode")
    lent = worker("b", "decode", "prefill")
    new = worker("n", "decode", "decode", "warming")
    loan = (Loan(instance="b", role="prefill"),)
    found = took(
        [
            record(0.0, (a, b), (1, 1), (1, 2), loan),
            record(1.0, (a, worker("b", "decode", "prefill", "changing")), (1, 2), (1, 2)),
            record(2.0, (a, lent), (1, 2), (1, 2)),
            record(9.0, (a, lent, new), (1, 2), (1, 2)),
        ]
    )
    assert found.loans == [2.0]
    assert found.starts == [9.0]


def test_splits_are_screened_by_what_the_simulator_makes_of_them() -> None:
    load = arrivals([Phase("prompts", 6.0, 4.0, 600, 4)], 1)
    assert best(4, 2, load, GOAL)[0] == (3, 1)
    assert met((3, 1), load, GOAL) > met((1, 1), load, GOAL)
