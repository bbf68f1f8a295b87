"""One turn of the autoscaler, again and again. It decides nothing itself.

    read --> snapshot --decide--> log --> loans, then numbers of workers --> what others see
                ^                    |
                +------ memory ------+

A turn may fail in any of its parts: that is told and counted, and the next one sees what is then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from msgspec.structs import replace

from cluster.autoscale.acting_lease import ActingLease
from cluster.autoscale.decision_log import DecisionLog
from cluster.autoscale.loans import Loans
from cluster.autoscale.replica_counts import Aside, Replicas
from cluster.observation.reading import Reading, Source
from cluster.settings.autoscaler_settings import AutoscalerSettings
from cluster.sizing.decision import Decision, Record
from cluster.sizing.snapshot import Counts, Memory, Snapshot, Worker
from protocol.errors import BatonError, Unavailable
from protocol.roles import ROLES, Role

# MERGED cluster.autoscale.starts
# How long a worker takes to start: from the asking for it to its registration, as seen.

_WEIGHT = 0.3  # of the newest in the average
_LONGEST_S = 3600.0  # what was asked for so long ago has not come


class Starts:
    """``seconds``: the average, or ``assumed_s`` until a worker has come that was asked for.

    Who comes is taken for the one that was asked for first. One that replaces a dead worker while
    another is awaited is taken for that one, too: it started the same way."""

    def __init__(self, assumed_s: float) -> None:
        self.seconds = assumed_s
        self._seen = False
        self._known: set[str] | None = None  # instances; None: nobody has looked yet
        self._asked: dict[Role, list[float]] = {role: [] for role in ROLES}

    def asked(self, before: Counts, after: Counts, at_s: float) -> None:
        """Other numbers of workers were asked for, by home."""
        for role in ROLES:
            more, waits = after.of(role) - before.of(role), self._asked[role]
            if more > 0:
                waits += [at_s] * more
            elif more < 0:
                del waits[max(0, len(waits) + more) :]  # the last to be asked for

    def look(self, workers: Iterable[Worker], at_s: float) -> None:
        """Who is there now."""
        there = {worker.instance: worker.home for worker in workers}
        new = there.keys() - self._known if self._known is not None else set()
        self._known = set(there) if self._known is None else self._known | set(there)
        for role, waits in self._asked.items():
            while waits and at_s - waits[0] > _LONGEST_S:
                del waits[0]
            for _ in [instance for instance in new if there[instance] == role]:
                if waits:
                    self._took(at_s - waits.pop(0))

    def _took(self, seconds: float) -> None:
        first, self._seen = not self._seen, True
        self.seconds = seconds if first else self.seconds + _WEIGHT * (seconds - self.seconds)


log = logging.getLogger("baton.autoscaler")

Policy = Callable[[Snapshot], Decision]

_LOG_S = 2.0
_LEAST_PAUSE_S = 0.25  # what changed a role has a moment to be seen by all


class World(NamedTuple):
    """What a turn asks and moves. ``lease``: None in advisory mode, which never acts."""

    source: Source
    replicas: Replicas
    loans: Loans
    lease: ActingLease | None


class Turn(NamedTuple):
    """What came of one. ``targets_known``: not those of the turn before."""

    record: Record
    reading: Reading
    targets_known: bool


class Loop:
    """``told`` hears of each turn, before anything is carried out. ``failures``: by what failed."""

    def __init__(
        self,
        settings: AutoscalerSettings,
        world: World,
        decisions: DecisionLog,
        policy: Policy,
        told: Callable[[Turn], None],
    ) -> None:
        self._settings = settings
        self._world = world
        self._decisions = decisions
        self._policy = policy
        self._told = told
        self._writing = Aside("the log of decisions")
        kept = decisions.kept(time.monotonic(), settings.down_after_s)
        self._memory = kept.memory if kept else Memory()
        self._starts = Starts(kept.start_s if kept else settings.start_s)
        self._targets: Counts | None = None
        self._number = 0
        self.failures: Counter[str] = Counter()
        self._said: dict[str, str] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            began = time.monotonic()
            try:
                await self.turn()
            except Exception:  # whatever it is: the next turn may do better
                log.exception("a turn of the autoscaler failed")
                self.failures["turn"] += 1
            left_s = self._settings.interval_s - (time.monotonic() - began)
            await asyncio.sleep(max(_LEAST_PAUSE_S, left_s))

    async def turn(self) -> Turn:
        reading = await self._world.source.read()
        acts = await self._acts()
        targets, known = await self._asked(reading)
        self._starts.look(reading.workers, reading.at_s)
        snapshot = reading.snapshot(
            goals=self._settings.goals,
            targets=targets,
            limits=self._settings.limits,
            tuning=self._settings.tuning(self._starts.seconds),
            memory=self._memory,
        )
        decision = self._policy(snapshot)
        self._memory = self._kept(decision)
        self._number += 1
        made = Turn(self._record(snapshot, decision, acts=acts), reading, known)
        await self._write(made.record)
        self._told(made)
        if acts:
            await self._act(made)
        return made

    def _kept(self, decision: Decision) -> Memory:
        """What goes on of it: where nobody carries decisions out, nothing was changed by one, and
        what is observed belongs to the workers that are there."""
        world, before = self._world, self._memory
        if world.lease is not None and (decision.loans or world.replicas.changes):
            return decision.memory
        return replace(
            decision.memory, last_change_s=before.last_change_s, last_down_s=before.last_down_s
        )

    async def _acts(self) -> bool:
        """Whether this turn's decision is ours to carry out."""
        if self._world.lease is None:
            return False
        try:
            return await self._world.lease.take()
        except Unavailable as error:
            self._failed("lease", str(error))
            return False

    async def _asked(self, reading: Reading) -> tuple[Counts, bool]:
        """Workers that were asked for, and whether that is so now: else as last known."""
        try:
            self._targets = await self._world.replicas.targets(reading.workers)
            return self._targets, True
        except Unavailable as error:
            self._failed("replicas", str(error))
        if self._targets is None:
            homes = [worker.home for worker in reading.workers if worker.state != "leaving"]
            return Counts(prefill=homes.count("prefill"), decode=homes.count("decode")), False
        return self._targets, False

    def _record(self, snapshot: Snapshot, decision: Decision, *, acts: bool) -> Record:
        return Record(
            run=self._decisions.run,
            number=self._number,
            time_s=time.time(),
            acted=acts,
            snapshot=snapshot,
            decision=decision,
        )

    async def _write(self, record: Record) -> None:
        try:
            await self._writing(lambda: self._decisions.append(record), _LOG_S)
        except (BatonError, OSError) as error:
            self._failed("log", f"a decision is not in the log: {error}")

    async def _act(self, turn: Turn) -> None:
        """Loans first: what they bring need not be started."""
        decision, before = turn.record.decision, turn.record.snapshot.targets
        for why in await self._world.loans.lend(decision.loans):
            self._failed("loan", why)
        after = decision.targets
        if after == before or not turn.targets_known or not self._world.replicas.changes:
            return
        if decision.loans and not await self._acts():
            return  # they took long, and another one has taken over
        try:
            await self._world.replicas.ask(before, after)
        except Unavailable as error:
            self._failed("replicas", str(error))
            return
        self._targets = after
        self._starts.asked(before, after, turn.record.snapshot.at_s)

    def _failed(self, what: str, why: str) -> None:
        """Counted always, and told when it is something else than last time."""
        self.failures[what] += 1
        if self._said.get(what) != why:
            self._said[what] = why
            log.warning("%s", why)
