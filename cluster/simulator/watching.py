"""How things stand, now and then: what plots are made of."""

from __future__ import annotations

import msgspec

from cluster.simulator.devices.clock import Clock
from cluster.simulator.devices.fleet import Fleet
from protocol.roles import ROLES, Role

# MERGED cluster.simulate.moment
# How a simulated cluster stands at one moment.


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """How things stood. Workers that serve, by role; ``starting`` those that were asked for;
    shares of ``busy`` time since the last one."""

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


class Watching:
    """``look`` every ``every_s`` seconds."""

    def __init__(self, clock: Clock, fleet: Fleet, every_s: float) -> None:
        self.moments: list[Moment] = []
        self.busy_s: dict[Role, float] = dict.fromkeys(ROLES, 0.0)  # by role
        self.worker_s: dict[Role, float] = dict.fromkeys(ROLES, 0.0)
        self._clock = clock
        self._fleet = fleet
        self._every_s = every_s
        self._before: dict[int, float] = {}  # busy seconds by worker

    def start(self) -> None:
        self._clock.at(self._clock.now + self._every_s, self.look)

    def look(self) -> None:
        self.start()
        busy, there = self._busy()
        serving = {role: self._fleet.count(role) for role in ROLES}
        share = {r: min(1.0, busy[r] / there[r]) if there[r] else 0.0 for r in ROLES}
        workers = self._fleet.workers
        decoders = [w for w in workers if w.role == "decode"]
        room = sum(w.machine.kv_tokens for w in decoders)
        self.moments.append(
            Moment(
                self._clock.now,
                serving["prefill"],
                serving["decode"],
                len(self._fleet.starting),
                sum(w.standing == "leaving" for w in workers),
                sum(w.prompts for w in workers),
                sum(w.batch.rows for w in decoders),
                share["prefill"],
                share["decode"],
                sum(w.used for w in decoders) / room if room else 0.0,
            )
        )

    def _busy(self) -> tuple[dict[Role, float], dict[Role, float]]:
        """Seconds since the last look, by role: spent in steps, and there."""
        busy: dict[Role, float] = dict.fromkeys(ROLES, 0.0)
        there: dict[Role, float] = dict.fromkeys(ROLES, 0.0)
        for worker in self._fleet.workers:
            worker.batch.settle(self._clock.now)  # so that its time is counted up to now
            spent = worker.busy_s - self._before.get(worker.number, 0.0)
            self._before[worker.number] = worker.busy_s
            busy[worker.role] += spent
            there[worker.role] += min(self._every_s, self._clock.now - worker.since_s)
        for role in ROLES:
            self.busy_s[role] += busy[role]
            self.worker_s[role] += there[role]
        return busy, there
