"""The simulated autoscaler: what routers would count, the product's policy, and its deeds."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from cluster.observation.reading import Reading
from cluster.observation.request_mix import Counter
from cluster.observation.sliding_window import Sliding
from cluster.simulator.devices import worker as simulated
from cluster.simulator.devices.clock import Clock
from cluster.simulator.devices.fleet import Fleet
from cluster.simulator.scenario import Scenario
from cluster.sizing.decision import Decision, Record
from cluster.sizing.snapshot import (
    Counts,
    Goals,
    Limits,
    Machine,
    Memory,
    Snapshot,
    State,
    Tuning,
    Worker,
)
from protocol.roles import ROLES, Role

BURST_LOOKS = 3
"""``burst_rate`` is that of so many intervals, as in ``cluster/autoscale/reading``."""


class Terms(NamedTuple):
    """What does not change while it runs."""

    goals: Goals
    limits: Limits
    tuning: Tuning
    machines: dict[Role, Machine]
    pace: float
    interval_s: float
    window_s: float
    warm_up_s: float
    loan_drain_s: float
    acts: bool


def terms(scenario: Scenario, machines: dict[Role, Machine]) -> Terms:
    of = scenario.autoscaler
    tuning = Tuning(
        loans=of.loans,
        down_after_s=of.down_after_s,
        lend_after_s=of.down_after_s / 10 if of.lend_after_s is None else of.lend_after_s,
        down_every_s=of.down_every_s,
        start_s=of.start_s,
    )
    if of.down_share is not None:
        tuning = replace(tuning, down_share=of.down_share)
    return Terms(
        goals=scenario.goals,
        limits=Limits(
            least=Counts(prefill=of.prefill_min, decode=of.decode_min),
            most=Counts(prefill=of.prefill_max, decode=of.decode_max),
            gpus=of.gpus,
        ),
        tuning=tuning,
        machines=machines,
        pace=scenario.machines.pace,
        interval_s=of.interval_s,
        window_s=of.window_s,
        warm_up_s=of.warm_up_s,
        loan_drain_s=of.loan_drain_s,
        acts=of.mode == "act",
    )


class Autoscaler:
    """``blind``: metrics are missing. ``records``: all decisions, if they are wanted."""

    def __init__(
        self,
        clock: Clock,
        terms: Terms,
        fleet: Fleet,
        counter: Counter,
        policy: Callable[[Snapshot], Decision],
        *,
        keep: bool,
    ) -> None:
        self.blind = False
        self.records: list[Record] = []
        self.reasons: Tally[str] = Tally()
        self._keep = keep
        self._clock = clock
        self._terms = terms
        self._fleet = fleet
        self._counter = counter
        self._policy = policy
        self._sliding = Sliding(terms.window_s, BURST_LOOKS * terms.interval_s)
        self._memory = Memory()
        self._targets = Counts(**{role: fleet.count(role) for role in ROLES})
        self._turns = 0

    @property
    def interval_s(self) -> float:
        return self._terms.interval_s

    def turn(self) -> None:
        """One look, one decision; the next turn is due after the interval."""
        self._clock.at(self._clock.now + self._terms.interval_s, self.turn)
        self._sliding.add(self._counter.take(self._terms.interval_s))
        snapshot = self._snapshot()
        decision = self._policy(snapshot)
        self._memory = decision.memory
        self.reasons[decision.reason] += 1
        if self._keep:
            self._record(snapshot, decision)
        if self._terms.acts:
            self._act(decision)

    def _snapshot(self) -> Snapshot:
        backlog = sum(w.queued_tokens for w in self._fleet.workers)
        decoding = sum(w.batch.rows for w in self._fleet.workers if w.role == "decode")
        mix = self._sliding.mix(
            pace=self._terms.pace, backlog_tokens=float(backlog), residents=float(decoding)
        )
        reading = Reading(
            at_s=self._clock.now,
            mix=None if self.blind else mix,
            observed=self._sliding.observed(),
            workers=tuple(self._worker(w) for w in self._fleet.workers),
            machines=self._terms.machines,
        )
        return reading.snapshot(
            goals=self._terms.goals,
            targets=self._targets,
            limits=self._terms.limits,
            tuning=self._terms.tuning,
            memory=self._memory,
        )

    def _worker(self, of: simulated.Worker) -> Worker:
        """Those that were there from the beginning are warm."""
        assert of.standing != "gone"
        state: State = of.standing
        young = of.since_s > 0 and self._clock.now - of.since_s < self._terms.warm_up_s
        if state == "serving" and young:
            state = "warming"
        role = of.heading if state == "changing" else of.role
        return Worker(instance=of.name, home=of.home, role=role, state=state, kv_tokens=of.used)

    def _record(self, snapshot: Snapshot, decision: Decision) -> None:
        self._turns += 1
        self.records.append(
            Record(
                run="simulated",
                number=self._turns,
                time_s=self._clock.now,
                acted=self._terms.acts,
                snapshot=snapshot,
                decision=decision,
            )
        )

    def _act(self, decision: Decision) -> None:
        """Loans first, then numbers, as ``cluster/autoscale`` does."""
        for loan in decision.loans:
            worker = self._fleet.named(loan.instance)
            if worker is not None:
                self._fleet.lend(worker, loan.role, self._terms.loan_drain_s)
        if decision.targets != self._targets:
            self._targets = decision.targets
            self._fleet.scale(decision.targets)
