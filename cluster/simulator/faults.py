"""What goes wrong in a scenario, and when it is over."""

from __future__ import annotations

from random import Random

from cluster.simulator.autoscaling import Autoscaler
from cluster.simulator.devices.clock import Clock
from cluster.simulator.devices.fleet import Fleet
from cluster.simulator.devices.network import Network
from cluster.simulator.scenario import EventSection, ScalingSection


class Starts:
    """How long cold starts take."""

    def __init__(self, of: ScalingSection, draw: Random) -> None:
        self._of = of
        self._draw = draw
        self.fixed_s: float | None = None  # while an event has it so
        self.fails = False

    def seconds(self) -> float | None:
        if self.fails:
            return None
        spread = self._of.start_spread
        usual = self._of.start_s * self._draw.uniform(1 - spread, 1 + spread)
        return usual if self.fixed_s is None else self.fixed_s


class Faults:
    def __init__(
        self, clock: Clock, fleet: Fleet, network: Network, starts: Starts,
        autoscaler: Autoscaler | None, draw: Random,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._fleet = fleet
        self._network = network
        self._starts = starts
        self._autoscaler = autoscaler
        self._draw = draw

    def plan(self, events: tuple[EventSection, ...]) -> None:
        for event in events:
            self._clock.at(event.at_s, self._begin, event)

    def _begin(self, event: EventSection) -> None:
        if event.kind == "die":
            for name in self._some(event):
                self._die(name)
            return
        names = self._some(event) if event.kind == "slow_link" else []
        before = {n: self._network.rates[n] for n in names}
        for number, rate in before.items():
            self._network.rates[number] = rate * event.share
        self._set(event, on=True)
        self._clock.at(self._clock.now + event.for_s, self._end, event, before)

    def _end(self, event: EventSection, rates: dict[int, float]) -> None:
        self._network.rates |= rates
        self._set(event, on=False)

    def _set(self, event: EventSection, *, on: bool) -> None:
        if event.kind == "slow_start":
            self._starts.fixed_s = event.start_s if on else None
        elif event.kind == "no_start":
            self._starts.fails = on
        elif event.kind == "blind" and self._autoscaler is not None:
            self._autoscaler.blind = on

    def _some(self, event: EventSection) -> list[int]:
        """Numbers of workers of the pool."""
        able = [w.number for w in self._fleet.workers if w.home == event.pool]
        return self._draw.sample(able, min(event.count, len(able)))

    def _die(self, number: int) -> None:
        self._fleet.die(next(w for w in self._fleet.workers if w.number == number))
