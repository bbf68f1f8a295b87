"""Fault injection: the ``events`` of a scenario and the duration of cold starts."""

from __future__ import annotations

from random import Random

from cluster.simulator.autoscaling import SimulatedAutoscaler
from cluster.simulator.devices.clock import SimulatedClock
from cluster.simulator.devices.fleet import SimulatedFleet
from cluster.simulator.devices.network import SimulatedNetwork
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


class FaultInjector:
    """Schedules the beginning and the end of each event on the simulated clock."""

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

    def schedule(self, events: tuple[EventSection, ...]) -> None:
        for event in events:
            self._clock.at(event.at_s, self._begin, event)

    def _begin(self, event: EventSection) -> None:
        if event.kind == "die":
            for number in self._pick_workers(event):
                self._fleet.die(next(w for w in self._fleet.workers if w.number == number))
            return
        numbers = self._pick_workers(event) if event.kind == "slow_link" else []
        before = {number: self._network.rates[number] for number in numbers}
        for number, rate in before.items():
            self._network.rates[number] = rate * event.share
        self._switch(event, on=True)
        self._clock.at(self._clock.now + event.for_s, self._end, event, before)

    def _end(self, event: EventSection, rates: dict[int, float]) -> None:
        self._network.rates |= rates
        self._switch(event, on=False)

    def _switch(self, event: EventSection, *, on: bool) -> None:
        if event.kind == "slow_start":
            self._starts.fixed_s = event.start_s if on else None
        elif event.kind == "no_start":
            self._starts.fails = on
        elif event.kind == "blind" and self._autoscaler is not None:
            self._autoscaler.blind = on

    def _pick_workers(self, event: EventSection) -> list[int]:
        """Return the numbers of ``event.count`` random workers of the event's pool."""
        numbers = [w.number for w in self._fleet.workers if w.home == event.pool]
        return self._rng.sample(numbers, min(event.count, len(numbers)))
