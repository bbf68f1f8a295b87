"""Turns of the autoscaler: what is carried out, what is not, and what failures do."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from msgspec.structs import replace

from cluster.settings import AutoscalerMode
from cluster.sizing.decision import Loan, ScalingDecision
from cluster.sizing.policy import decide
from cluster.sizing.snapshot import DemandSample, SizingSnapshot, WorkerCounts
from tests.cluster.autoscale.scaling import Scaled
from tests.cluster.sizing.worlds import mix, workers

BUSY = mix(40.0)


async def test_more_is_asked_for_and_logged(tmp_path: Path) -> None:
    scaled = Scaled(tmp_path, BUSY, loans=False)
    turn = await scaled.loop.turn()
    made = turn.record.decision
    assert made.reason in ("demand", "limit")
    assert scaled.asked.asked == [made.targets]
    assert made.targets.total > 2
    [record] = scaled.records()
    assert record == turn.record
    assert (record.acted, record.number) == (True, 1)


async def test_lines_can_be_decided_again(tmp_path: Path) -> None:
    scaled = Scaled(tmp_path, BUSY)
    for rate in (40.0, 80.0, 3.0, 0.1):
        scaled.seen.load = mix(rate, uncached=123.4, output=56.7)
        scaled.seen.workers = workers(*(min(9, int(rate) + 1) for _ in range(2)))
        await scaled.loop.turn()
    records = scaled.records()
    assert [r.number for r in records] == [1, 2, 3, 4]
    for record in records:
        assert decide(record.snapshot) == record.decision
    for one, next_ in itertools.pairwise(records):
        assert next_.snapshot.memory == one.decision.memory
        assert next_.snapshot.targets == one.decision.targets


async def test_advice_is_not_carried_out(tmp_path: Path) -> None:
    scaled = Scaled(tmp_path, BUSY, mode="advise")
    turn = await scaled.loop.turn()
    assert turn.record.decision.targets.total > 2
    assert not scaled.asked.asked and not scaled.loans.lent
    assert [record.acted for record in scaled.records()] == [False]


@pytest.mark.parametrize("mode", ["advise", "act"])
async def test_what_nobody_does_changes_nothing(tmp_path: Path, mode: AutoscalerMode) -> None:
    """Without Ray as in advice: what is observed still corrects what is predicted."""
    scaled = Scaled(tmp_path, BUSY, mode=mode, loans=False)
    scaled.asked.changes = False
    turn = await scaled.loop.turn()
    assert turn.record.decision.targets.total > 2
    turn = await scaled.loop.turn()
    assert turn.record.snapshot.memory.last_change_s is None
    assert not scaled.asked.asked


async def test_who_lacks_the_lease_watches(tmp_path: Path) -> None:
    scaled = Scaled(tmp_path, BUSY)
    for held in (False, None, True):
        scaled.lease.held = held
        await scaled.loop.turn()
        await asyncio.sleep(0.05)  # a lack of workers that is this new may be chance
    assert [record.acted for record in scaled.records()] == [False, False, True]
    assert len(scaled.asked.asked) == 1
    assert scaled.loop.failures == {"lease": 1}


async def test_loans_and_numbers_are_carried_out(tmp_path: Path) -> None:
    loan = Loan(instance="p0", role="decode")

    def policy(snapshot: SizingSnapshot) -> ScalingDecision:
        targets = WorkerCounts(prefill=2, decode=2)
        return replace(decide(snapshot), loans=(loan,), targets=targets)

    scaled = Scaled(tmp_path, BUSY, policy)
    scaled.loans.why = "worker p0 is gone"
    await scaled.loop.turn()
    await failed_loans(scaled, 1)
    assert scaled.loans.lent == [loan]
    assert scaled.asked.asked == [WorkerCounts(prefill=2, decode=2)]
    assert scaled.loop.failures == {"loan": 1}


async def test_a_loan_that_failed_is_not_repeated_until_a_start_would_be_over(
    tmp_path: Path,
) -> None:
    loans = (Loan(instance="p0", role="decode"), Loan(instance="d0", role="prefill"))
    scaled = Scaled(tmp_path, BUSY, lambda seen: replace(decide(seen), loans=loans), start_s=0.2)
    scaled.loans.why = "it does not answer"
    assert (await scaled.loop.turn()).record.snapshot.failed_loans == ()
    await failed_loans(scaled, 2)
    scaled.loans.why = ""
    assert (await scaled.loop.turn()).record.snapshot.failed_loans == ("d0", "p0")
    await asyncio.sleep(0.25)
    assert (await scaled.loop.turn()).record.snapshot.failed_loans == ()


async def failed_loans(scaled: Scaled, count: int) -> None:
    """Wait until so many loans have failed."""
    async with asyncio.timeout(5):
        while scaled.loop.failures["loan"] < count:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("why", ["", "its streams did not end"])
async def test_turns_go_on_while_a_worker_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Its record does not say yet that it changes, and it is not lent twice."""
    monkeypatch.setattr("cluster.autoscale.loans.ROLE_CHANGE_S", 0.0)
    loan = Loan(instance="d0", role="prefill")
    scaled = Scaled(tmp_path, BUSY, lambda seen: replace(decide(seen), loans=(loan,)))
    lend, drained = scaled.loans.lend, asyncio.Event()

    async def slow(loan: Loan) -> str:
        await lend(loan)
        await drained.wait()
        return why

    scaled.loans.lend = slow  # type: ignore[method-assign]
    changing = replace(scaled.seen.workers[1], role="prefill", state="changing")
    async with asyncio.timeout(5):
        for workers_then in (scaled.seen.workers, (scaled.seen.workers[0], changing)):
            turn = await scaled.loop.turn()
            assert turn.record.snapshot.workers == workers_then
            await asyncio.sleep(0.01)
    assert scaled.loans.lent == [loan]
    drained.set()
    await asyncio.sleep(0.05)
    assert (await scaled.loop.turn()).record.snapshot.workers == scaled.seen.workers
    assert scaled.loop.failures == ({"loan": 1} if why else {})


async def test_the_end_of_the_loop_is_that_of_its_loans(tmp_path: Path) -> None:
    loan = Loan(instance="d0", role="prefill")
    scaled = Scaled(tmp_path, BUSY, lambda seen: replace(decide(seen), loans=(loan,)))
    cancelled: list[str] = []

    async def endless(loan: Loan) -> str:
        try:
            await asyncio.sleep(3600.0)
        except asyncio.CancelledError:
            cancelled.append(loan.instance)
            raise
        return ""

    scaled.loans.lend = endless  # type: ignore[method-assign]
    task = asyncio.create_task(scaled.loop.run())
    await asyncio.sleep(0.1)
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.cancelled() and cancelled == ["d0"]


async def test_a_loan_that_raises_has_failed(tmp_path: Path) -> None:
    loan = Loan(instance="d0", role="prefill")
    scaled = Scaled(tmp_path, BUSY, lambda seen: replace(decide(seen), loans=(loan,)))

    async def broken(loan: Loan) -> str:
        raise RuntimeError("a bug")

    scaled.loans.lend = broken  # type: ignore[method-assign]
    await scaled.loop.turn()
    await failed_loans(scaled, 1)
    assert (await scaled.loop.turn()).record.snapshot.failed_loans == ("d0",)


async def test_without_serve_numbers_are_held(tmp_path: Path) -> None:
    """What was asked for last counts, and nothing is asked while nobody says what is so now."""
    scaled = Scaled(tmp_path, BUSY, loans=False)
    await scaled.loop.turn()
    before = scaled.asked.now
    scaled.asked.away = True
    scaled.seen.load = mix(400.0)
    turn = await scaled.loop.turn()
    assert turn.record.snapshot.targets == before
    assert not turn.targets_known
    assert scaled.loop.failures == {"replicas": 1}
    scaled.asked.away = False
    await scaled.loop.turn()
    assert len(scaled.asked.asked) <= 2


async def test_serve_away_from_the_start(tmp_path: Path) -> None:
    scaled = Scaled(tmp_path, BUSY)
    scaled.asked.away = True
    turn = await scaled.loop.turn()
    assert turn.record.snapshot.targets == WorkerCounts(prefill=1, decode=1)
    assert not scaled.asked.asked


async def test_no_metrics_hold(tmp_path: Path) -> None:
    scaled = Scaled(tmp_path, None)
    turn = await scaled.loop.turn()
    assert turn.record.decision.reason == "no_metrics"
    assert not scaled.asked.asked and not scaled.loans.lent


async def test_a_turn_that_fails_is_counted_and_the_next_one_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.autoscale.loop._LEAST_PAUSE_S", 0.01)
    scaled = Scaled(tmp_path, BUSY, interval_s=0.01)
    scaled.seen.error = RuntimeError("a bug")
    task = asyncio.create_task(scaled.loop.run())
    async with asyncio.timeout(5):
        while scaled.loop.failures["turn"] < 2:
            await asyncio.sleep(0.005)
        scaled.seen.error = None
        while len(scaled.turns) < 2:
            await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.wait([task])


async def test_a_log_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    scaled = Scaled(tmp_path / "folder", BUSY, loans=False)
    scaled.log.close()
    scaled.log.path.unlink()
    scaled.log.path.mkdir()
    await scaled.loop.turn()
    assert scaled.loop.failures == {"log": 1}
    assert scaled.asked.asked


async def test_memory_goes_on_after_a_restart(tmp_path: Path) -> None:
    first = Scaled(tmp_path, BUSY, start_s=60.0)
    await first.loop.turn()
    first.loop._starts.seconds = 7.0
    await first.loop.turn()
    again = Scaled(tmp_path, BUSY, start_s=60.0)
    turn = await again.loop.turn()
    before, snapshot = first.records()[1], turn.record.snapshot
    assert turn.record.number == 1 and turn.record.run != before.run
    assert snapshot.memory == before.decision.memory
    assert snapshot.memory.past and isinstance(snapshot.memory.past[0], DemandSample)
    assert snapshot.tuning.start_s == 7.0
