"""Regular samples of the simulated fleet, from which the result page draws its plots."""

from __future__ import annotations

import msgspec

from cluster.simulator.devices.clock import SimulatedClock
from cluster.simulator.devices.fleet import SimulatedFleet
from protocol.roles import ROLES, Role


class FleetSample(msgspec.Struct, frozen=True, array_like=True):
    """The state of the fleet at one time.

    ``prefill`` and ``decode``: workers that serve each role. ``starting``: workers that were asked
    for. ``busy_*``: shares of the time since the last sample.
    """

    at_s: float
    prefill: int
    decode: int
    starting: int
    leaving: int
    queued: int  # requests whose prompt is not computed
    decoding: int
    busy_prefill: float
    busy_decode: float
    kv_share: float  # of the decode workers' pools


class FleetSampler:
    """Takes a sample every ``every_s`` seconds; ``Simulation.run`` creates it.

    ``busy_s`` and ``worker_s`` are sums of the samples by role.
    """

    def __init__(self, clock: SimulatedClock, fleet: SimulatedFleet, every_s: float) -> None:
        self.samples: list[FleetSample] = []
        self.busy_s: dict[Role, float] = dict.fromkeys(ROLES, 0.0)
        self.worker_s: dict[Role, float] = dict.fromkeys(ROLES, 0.0)
        self._clock = clock
        self._fleet = fleet
        self._every_s = every_s
        self._busy_before: dict[int, float] = {}  # busy seconds by worker

    def start(self) -> None:
        self._clock.at(self._clock.now + self._every_s, self._sample)

    def reset_sums(self) -> None:
        self.busy_s = dict.fromkeys(ROLES, 0.0)
        self.worker_s = dict.fromkeys(ROLES, 0.0)

    def _sample(self) -> None:
        self.start()
        busy, there = self._busy_seconds()
        serving = {role: self._fleet.count(role) for role in ROLES}
        share = {r: min(1.0, busy[r] / there[r]) if there[r] else 0.0 for r in ROLES}
        workers = self._fleet.workers
        decoders = [w for w in workers if w.role == "decode"]
        pool_tokens = sum(w.machine.kv_tokens for w in decoders)
        self.samples.append(
            FleetSample(
                self._clock.now,
                serving["prefill"],
                serving["decode"],
                len(self._fleet.starting),
                sum(w.state == "leaving" for w in workers),
                sum(w.uncomputed_prompts for w in workers),
                sum(w.batch.rows for w in decoders),
                share["prefill"],
                share["decode"],
                sum(w.pool.used_tokens for w in decoders) / pool_tokens if pool_tokens else 0.0,
            )
        )

    def _busy_seconds(self) -> tuple[dict[Role, float], dict[Role, float]]:
        """Return the worker-seconds spent in steps, and in all, since the last sample by role."""
        busy: dict[Role, float] = dict.fromkeys(ROLES, 0.0)
        there: dict[Role, float] = dict.fromkeys(ROLES, 0.0)
        for worker in self._fleet.workers:
            worker.batch.settle(self._clock.now)  # so that its time is counted up to now
            left_s = max(0.0, worker.free_s - self._clock.now)  # counted when its steps began
            spent = worker.busy_s - left_s - self._busy_before.get(worker.number, 0.0)
            self._busy_before[worker.number] = worker.busy_s - left_s
            busy[worker.role] += spent
            there[worker.role] += min(self._every_s, self._clock.now - worker.since_s)
        for role in ROLES:
            self.busy_s[role] += busy[role]
            self.worker_s[role] += there[role]
        return busy, there
