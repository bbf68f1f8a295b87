"""Workers that come, go and change their role.

    asked for --start_s--> serving --role change--> changing --idle, or drain_s over--> serving
                              |
                              +--stop--> leaving --idle, or drain_s over--> gone
                              +--death-------------------------------------> gone

GPU-seconds run from the moment that a worker is asked for until it is gone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from cluster.simulator.devices.clock import Clock
from cluster.simulator.devices.network import Network
from cluster.simulator.devices.request_life import Life
from cluster.simulator.devices.routing import Router
from cluster.simulator.devices.worker import Worker
from cluster.sizing.snapshot import Counts, Machine
from protocol.roles import ROLES, Role
from router.placement.prefix_index import PrefixIndex

ROLE_S = 0.3
"""From a change of role until routers know it: they look twice a second."""
NOTICE_S = 0.25
"""From a worker's death until its requests are elsewhere: its streams break at once."""
AGAIN_S = 10.0
"""After a start that failed it is tried again."""


class Starting:
    """One that was asked for."""

    def __init__(self, home: Role, asked_s: float) -> None:
        self.home = home
        self.asked_s = asked_s
        self.given_up = False


class Fleet:
    """``start_s``: seconds of a cold start, drawn anew for each; None: it fails, now. ``replaces``:
    somebody keeps the number of workers, as Ray Serve does: for one that dies another starts."""

    def __init__(
        self, clock: Clock, machines: dict[Role, Machine], pace: float, drain_s: float,
        router: Router, life: Life, network: Network, index: PrefixIndex, chance: Random,
        start_s: Callable[[], float | None],
    ) -> None:  # fmt: skip
        self.replaces = False
        self.workers: list[Worker] = []  # that are not gone
        self.gone: list[Worker] = []
        self.starting: list[Starting] = []
        self.lost_gpu_s = 0.0  # of starts that were given up
        self.loans = 0
        self._clock = clock
        self._machines = machines
        self._pace = pace
        self._drain_s = drain_s
        self._router = router
        self._life = life
        self._network = network
        self._index = index
        self._chance = chance
        self._start_s = start_s
        self._numbers = 0
        life.on_idle = self._idle

    # ---- coming -----------------------------------------------------------------------------

    def add(self, home: Role, asked_s: float | None = None) -> Worker:
        """A worker that serves from now on."""
        machine = self._machines[home]
        worker = Worker(
            self._numbers, home, machine, self._clock, self._life, self._index, self._pace
        )
        self._numbers += 1
        worker.asked_s = self._clock.now if asked_s is None else asked_s
        self._network.rates[worker.number] = machine.link_bytes_s
        self._life.most_tokens = max(self._life.most_tokens, machine.kv_tokens)
        self.workers.append(worker)
        self._changed()
        return worker

    def start(self, home: Role) -> None:
        one = Starting(home, self._clock.now)
        self.starting.append(one)
        self._try(one)

    def _try(self, one: Starting) -> None:
        seconds = None if one.given_up else self._start_s()
        if seconds is not None:
            self._clock.at(self._clock.now + seconds, self._up, one)
        elif not one.given_up:
            self._clock.at(self._clock.now + AGAIN_S, self._try, one)

    def _up(self, one: Starting) -> None:
        if not one.given_up:
            self.starting.remove(one)
            self.add(one.home, one.asked_s)

    def _changed(self) -> None:
        self._router.told(self.workers)
        self._life.workers_changed()

    # ---- going ------------------------------------------------------------------------------

    def scale(self, wanted: Counts) -> None:
        """So many workers by home: what starts goes first, then whoever chance wants."""
        for home in ROLES:
            starting = [s for s in self.starting if s.home == home]
            staying = [w for w in self.workers if w.home == home and w.standing != "leaving"]
            more = wanted.of(home) - len(starting) - len(staying)
            for _ in range(more):
                self.start(home)
            for one in starting[: max(0, -more)]:
                self._give_up(one)
            over = -more - len(starting)
            for worker in self._chance.sample(staying, max(0, over)):
                self.stop(worker)

    def _give_up(self, one: Starting) -> None:
        one.given_up = True
        self.starting.remove(one)
        self.lost_gpu_s += self._clock.now - one.asked_s

    def stop(self, worker: Worker) -> None:
        """It takes nothing more, finishes for a while, and hands over the rest."""
        worker.standing = "leaving"
        self._changed()
        self._drain(worker, self._drain_s)

    def _drain(self, worker: Worker, seconds: float) -> None:
        if worker.jobs:
            self._clock.at(self._clock.now + seconds, self._hand_over, worker, worker.standing)
        else:
            self._idle(worker)

    def _hand_over(self, worker: Worker, standing: str) -> None:
        if worker.standing == standing:
            for job in list(worker.jobs):
                self._life.restart(job, 0.0, died=False)

    def _idle(self, worker: Worker) -> None:
        if worker.standing == "leaving":
            self._remove(worker)
        elif worker.standing == "changing" and worker.role != worker.heading:
            worker.role = worker.heading
            self._clock.at(self._clock.now + ROLE_S, self._serves, worker)

    def die(self, worker: Worker) -> None:
        """Without a word."""
        jobs, stayed = list(worker.jobs), worker.standing != "leaving"
        self._remove(worker)
        if self.replaces and stayed:
            self.start(worker.home)
        for job in jobs:
            self._life.restart(job, NOTICE_S, died=True)

    def _remove(self, worker: Worker) -> None:
        worker.standing = "gone"
        worker.gone_s = self._clock.now
        worker.cache.clear()
        self.workers.remove(worker)
        self.gone.append(worker)
        self._changed()

    # ---- changing ---------------------------------------------------------------------------

    def lend(self, worker: Worker, role: Role, drain_s: float) -> None:
        """The worker serves another role from now on, or as soon as it has drained."""
        if worker.role == role or worker.standing != "serving":
            return
        self.loans += 1
        worker.standing, worker.heading = "changing", role
        self._changed()
        if role == "decode":
            worker.role = "decode"
            worker.pump()
            self._clock.at(self._clock.now + ROLE_S, self._serves, worker)
        else:
            self._drain(worker, drain_s)

    def _serves(self, worker: Worker) -> None:
        if worker.standing == "changing":
            worker.standing = "serving"
            self._changed()

    # ---- figures ----------------------------------------------------------------------------

    def named(self, name: str) -> Worker | None:
        return next((w for w in self.workers if w.name == name), None)

    def count(self, role: Role) -> int:
        return sum(w.role == role and w.standing == "serving" for w in self.workers)

    def gpu_seconds(self) -> float:
        now = self._clock.now
        worked = math.fsum(
            (now if w.gone_s is None else w.gone_s) - w.asked_s for w in [*self.workers, *self.gone]
        )
        starts = math.fsum(now - s.asked_s for s in self.starting)
        return worked + starts + self.lost_gpu_s
