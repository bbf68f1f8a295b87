"""Fault injection: the ``events`` of a scenario and the duration of cold starts."""

from __future__ import annotations

import math
from random import Random
from typing import NamedTuple

from cluster.simulator.autoscaling import SimulatedAutoscaler
from cluster.simulator.devices.clock import SimulatedClock
from cluster.simulator.devices.fleet import SimulatedFleet
from cluster.simulator.devices.network import SimulatedNetwork
from cluster.simulator.devices.worker import SimulatedWorker
from cluster.simulator.scenario import EventSection, ScalingSection


class ColdStarts:
    """Draws how long each cold start takes."""

    def __init__(self, section: ScalingSection, rng: Random) -> None:
        self._section = section
        self._rng = rng
        self.fixed_s: float | None = None  # during a slow_start event
        self.fails = False

    def seconds(self) -> float | None:
        """Return the seconds of one start; None when it fails."""
        if self.fails:
            return None
        spread = self._section.start_spread
        usual = self._section.start_s * self._rng.uniform(1 - spread, 1 + spread)
        return usual if self.fixed_s is None else self.fixed_s


class ActiveFault(NamedTuple):
    """An event that lasts."""

    event: EventSection
    slowed: frozenset[SimulatedWorker]  # workers whose links it slows


class FaultInjector:
    """Schedules the beginning and the end of each event on the simulated clock. Events may overlap:
    the shares of a link are multiplied, and the latest slow_start counts."""

    def __init__(
        self, clock: SimulatedClock, fleet: SimulatedFleet, network: SimulatedNetwork,
        starts: ColdStarts, autoscaler: SimulatedAutoscaler | None, rng: Random,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._fleet = fleet
        self._network = network
        self._starts = starts
        self._autoscaler = autoscaler
        self._rng = rng
        self._active: list[ActiveFault] = []  # in the order in which they began

    def schedule(self, events: tuple[EventSection, ...]) -> None:
        for event in events:
            self._clock.at(event.at_s, self._begin, event)

    def _begin(self, event: EventSection) -> None:
        if event.kind == "die":
            for worker in self._pick_workers(event):
                if worker.state != "gone":  # the death of another one may let a worker leave
                    self._fleet.die(worker)
            return
        slowed = self._pick_workers(event) if event.kind == "slow_link" else []
        fault = ActiveFault(event, frozenset(slowed))
        self._active.append(fault)
        self._update(fault)
        self._clock.at(self._clock.now + event.for_s, self._end, fault)

    def _end(self, fault: ActiveFault) -> None:
        self._active.remove(fault)
        self._update(fault)

    def _update(self, fault: ActiveFault) -> None:
        """Set what ``fault`` affects, which begins or has ended, from the events that last."""
        for worker in fault.slowed:
            shares = [a.event.share for a in self._active if worker in a.slowed]
            rate = worker.machine.link_bytes_s * math.prod(shares)
            self._network.rates[worker.number] = rate
        slow_starts = [a.event.start_s for a in self._active if a.event.kind == "slow_start"]
        self._starts.fixed_s = slow_starts[-1] if slow_starts else None
        kinds = {a.event.kind for a in self._active}
        self._starts.fails = "no_start" in kinds
        if self._autoscaler is not None:
            self._autoscaler.blind = "blind" in kinds

    def _pick_workers(self, event: EventSection) -> list[SimulatedWorker]:
        """Return ``event.count`` random workers of the event's pool."""
        workers = [w for w in self._fleet.workers if w.home == event.pool]
        return self._rng.sample(workers, min(event.count, len(workers)))
