"""The turns of the autoscaler. The loop itself decides nothing.

    read --> snapshot --decide--> log --> loans, then numbers of workers --> listeners
                ^                    |
                +------ memory ------+

Loans are carried out while turns go on: the next snapshots show their workers as changing, and
those of which a loan has failed.

A turn may fail in any of its parts: the failure is logged and counted, and the next turn starts
from what is true then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from cluster.autoscale.acting_lease import ActingLease
from cluster.autoscale.decision_log import DecisionLog
from cluster.autoscale.loans import LoanExecutor, PendingLoans, with_pending_roles
from cluster.autoscale.replica_counts import BlockingCall, ReplicaController
from cluster.autoscale.start_times import StartTimeEstimate
from cluster.observation.reading import ClusterReading, ReadingSource
from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.sizing.decision import DecisionRecord, ScalingDecision
from cluster.sizing.snapshot import (
    SizingMemory,
    SizingSnapshot,
    WorkerCounts,
    staying,
)
from protocol.errors import BatonError, Unavailable

log = logging.getLogger("baton.autoscaler")

ScalingPolicy = Callable[[SizingSnapshot], ScalingDecision]

RESTORED_S = 180.0
"""Age up to which the memory of the last line of the log is continued. Corrections and growth
survive in any case, the demand only where the first window reaches back to it (``LONGEST_GAP``)."""
_LOG_S = 2.0
_LEAST_PAUSE_S = 0.25


class LoopDependencies(NamedTuple):
    """The services that a turn calls. ``lease``: None in advisory mode, which never acts."""

    source: ReadingSource
    replicas: ReplicaController
    loans: LoanExecutor
    lease: ActingLease | None


class AutoscalerTurn(NamedTuple):
    """The result of one turn. ``targets_known``: the targets are of this turn, not of an earlier
    one."""

    record: DecisionRecord
    reading: ClusterReading
    targets_known: bool


class AutoscalerLoop:
    """``on_turn`` is called after each decision, before it is carried out. ``failures``: counts by
    the part that failed."""

    def __init__(
        self,
        settings: AutoscalerSettings,
        dependencies: LoopDependencies,
        decisions: DecisionLog,
        policy: ScalingPolicy,
        on_turn: Callable[[AutoscalerTurn], None],
    ) -> None:
        self._settings = settings
        self._dependencies = dependencies
        self._decisions = decisions
        self._policy = policy
        self._on_turn = on_turn
        self._writing = BlockingCall("the log of decisions")
        restored = decisions.restore(time.monotonic(), RESTORED_S)
        self._memory = restored.memory if restored else SizingMemory()
        self._starts = StartTimeEstimate(restored.start_s if restored else settings.start_s)
        self._loans = PendingLoans(dependencies.loans, lambda why: self._failed("loan", why))
        self._targets: WorkerCounts | None = None
        self._number = 0
        self.failures: Counter[str] = Counter()
        self._last_failure: dict[str, str] = {}

    async def run(self) -> None:
        """Run turns until cancelled."""
        try:
            while True:
                began = time.monotonic()
                try:
                    await self.turn()
                except Exception:  # any error: the next turn may succeed
                    log.exception("a turn of the autoscaler failed")
                    self.failures["turn"] += 1
                left_s = self._settings.interval_s - (time.monotonic() - began)
                await asyncio.sleep(max(_LEAST_PAUSE_S, left_s))
        finally:
            await self._loans.close()

    async def turn(self) -> AutoscalerTurn:
        changing = self._loans.roles()
        reading = await self._dependencies.source.read()
        reading = replace(reading, workers=with_pending_roles(reading.workers, changing))
        acts = await self._take_lease()
        targets, known = await self._current_targets(reading)
        self._starts.observe(reading.workers, reading.at_s)
        snapshot = reading.snapshot(
            goals=self._settings.goals,
            targets=targets,
            limits=self._settings.limits,
            tuning=self._settings.tuning(self._starts.seconds),
            memory=self._memory,
        )
        failed = self._loans.failed_since(reading.at_s - self._starts.seconds)
        snapshot = replace(snapshot, failed_loans=failed)
        decision = self._policy(snapshot)
        self._memory = self._next_memory(decision)
        self._number += 1
        turn = AutoscalerTurn(self._record(snapshot, decision, acts=acts), reading, known)
        await self._write(turn.record)
        self._on_turn(turn)
        if acts:
            await self._act(turn)
        return turn

    def _next_memory(self, decision: ScalingDecision) -> SizingMemory:
        """Return the memory for the next turn. Where a decision is not carried out, it changed
        nothing, and what is observed belongs to the workers that exist."""
        dependencies, before = self._dependencies, self._memory
        if dependencies.lease is not None and (decision.loans or dependencies.replicas.changes):
            return decision.memory
        return replace(
            decision.memory, last_change_s=before.last_change_s, last_down_s=before.last_down_s
        )

    async def _take_lease(self) -> bool:
        """Return whether this autoscaler carries this turn's decision out."""
        if self._dependencies.lease is None:
            return False
        try:
            return await self._dependencies.lease.take()
        except Unavailable as error:
            self._failed("lease", str(error))
            return False

    async def _current_targets(self, reading: ClusterReading) -> tuple[WorkerCounts, bool]:
        """Return the workers that were asked for, and whether the numbers are of now rather than
        the last known."""
        try:
            self._targets = await self._dependencies.replicas.targets(reading.workers)
            return self._targets, True
        except Unavailable as error:
            self._failed("replicas", str(error))
        if self._targets is None:
            return WorkerCounts.count(w.home for w in staying(reading.workers)), False
        return self._targets, False

    def _record(
        self, snapshot: SizingSnapshot, decision: ScalingDecision, *, acts: bool
    ) -> DecisionRecord:
        return DecisionRecord(
            run=self._decisions.run,
            number=self._number,
            time_s=time.time(),
            acted=acts,
            snapshot=snapshot,
            decision=decision,
        )

    async def _write(self, record: DecisionRecord) -> None:
        try:
            await self._writing(lambda: self._decisions.append(record), _LOG_S)
        except (BatonError, OSError) as error:
            self._failed("log", f"a decision could not be logged: {error}")

    async def _act(self, turn: AutoscalerTurn) -> None:
        """Begin loans first: workers that they bring need not be started."""
        decision, before = turn.record.decision, turn.record.snapshot.targets
        self._loans.start(decision.loans)
        after = decision.targets
        if after == before or not turn.targets_known or not self._dependencies.replicas.changes:
            return
        try:
            await self._dependencies.replicas.ask(before, after)
        except Unavailable as error:
            self._failed("replicas", str(error))
            return
        self._targets = after
        self._starts.record_request(before, after, turn.record.snapshot.at_s)

    def _failed(self, what: str, why: str) -> None:
        """Count a failure, and log it if its reason is new."""
        self.failures[what] += 1
        if self._last_failure.get(what) != why:
            self._last_failure[what] = why
            log.warning("%s", why)
