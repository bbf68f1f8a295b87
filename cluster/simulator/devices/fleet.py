"""Simulated workers that start, stop, die and change their role.

    asked for --start_s--> serving --role change--> changing --idle, or drain_s over--> serving
                              |
                              +--stop--> leaving --idle, or drain_s over--> gone
                              +--death-------------------------------------> gone

GPU-seconds count from the moment a worker is asked for until it is gone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random

from cluster.simulator.devices.batch import DraftPace
from cluster.simulator.devices.clock import SimulatedClock
from cluster.simulator.devices.lifecycle import RequestLifecycle
from cluster.simulator.devices.network import SimulatedNetwork
from cluster.simulator.devices.routing import SimulatedRouter
from cluster.simulator.devices.worker import SimulatedWorker
from cluster.sizing.snapshot import MachineModel, WorkerCounts
from protocol.performance.step_model import StepModel
from protocol.roles import ROLES, Role
from router.placement.prefix_index import PrefixIndex

ROLE_S = 0.3
"""Seconds from a change of role until routers know it: they look twice a second."""
NOTICE_S = 0.25
"""Seconds from a worker's death until its requests are placed again: its streams break at once."""
AGAIN_S = 10.0
"""Seconds until a failed start is tried again."""


class StartingWorker:
    """A worker that was asked for and does not serve yet."""

    def __init__(self, home: Role, asked_s: float) -> None:
        self.home = home
        self.asked_s = asked_s
        self.gone_s: float | None = None  # when the start was given up


class SimulatedFleet:
    """All workers of a simulation.

    ``start_s`` draws the seconds of a cold start; None means that this attempt fails at once.
    ``replaces``: something keeps the number of workers, as Ray Serve does, and starts another one
    for a worker that dies.
    """

    def __init__(
        self, clock: SimulatedClock, machines: dict[Role, MachineModel],
        drain_s: float, routers: Sequence[SimulatedRouter], lifecycle: RequestLifecycle,
        network: SimulatedNetwork, index: PrefixIndex, rng: Random,
        start_s: Callable[[], float | None],
    ) -> None:  # fmt: skip
        self.replaces = False
        self.workers: list[SimulatedWorker] = []  # those that are not gone
        self.gone: list[SimulatedWorker | StartingWorker] = []
        self.starting: list[StartingWorker] = []
        self.loans = 0
        self._clock = clock
        self._machines = machines
        self._drafts = {
            r: DraftPace(StepModel(*m.step), m.speculation) for r, m in machines.items()
        }
        self._drain_s = drain_s
        self.routers = routers
        self._lifecycle = lifecycle
        self._network = network
        self._index = index
        self._rng = rng
        self._start_s = start_s
        self._next_number = 0
        lifecycle.on_idle = self._on_idle

    # ---- starting ---------------------------------------------------------------------------

    def add(self, home: Role, asked_s: float | None = None) -> SimulatedWorker:
        """Add a worker that serves from now on."""
        machine = self._machines[home]
        worker = SimulatedWorker(
            *(self._next_number, home, machine, self._clock, self._lifecycle, self._index),
            *(self._drafts[home], self.routers[0].terms.goals),
        )
        self._next_number += 1
        worker.asked_s = self._clock.now if asked_s is None else asked_s
        self._network.rates[worker.number] = machine.link_bytes_s
        self._lifecycle.max_tokens[home] = machine.kv_tokens
        self.workers.append(worker)
        self._workers_changed()
        return worker

    def start(self, home: Role) -> None:
        """Ask for one more worker of a pool."""
        worker = StartingWorker(home, self._clock.now)
        self.starting.append(worker)
        self._try_start(worker)

    def _try_start(self, worker: StartingWorker) -> None:
        if worker.gone_s is not None:
            return
        seconds = self._start_s()
        if seconds is not None:
            self._clock.at(self._clock.now + seconds, self._started, worker)
        else:
            self._clock.at(self._clock.now + AGAIN_S, self._try_start, worker)

    def _started(self, worker: StartingWorker) -> None:
        if worker.gone_s is None:
            self.starting.remove(worker)
            self.add(worker.home, worker.asked_s)

    def _workers_changed(self) -> None:
        for router in self.routers:
            router.update_workers(self.workers)
        self._lifecycle.retry_waiting()

    # ---- stopping ---------------------------------------------------------------------------

    def scale(self, targets: WorkerCounts) -> None:
        """Start or stop workers by home: starting ones are given up first, others at random."""
        for home in ROLES:
            starting = [s for s in self.starting if s.home == home]
            staying = [w for w in self.workers if w.home == home and w.state != "leaving"]
            more = targets.of(home) - len(starting) - len(staying)
            for _ in range(more):
                self.start(home)
            for one in starting[: max(0, -more)]:
                self._give_up(one)
            over = -more - len(starting)
            for worker in self._rng.sample(staying, max(0, over)):
                self.stop(worker)

    def _give_up(self, worker: StartingWorker) -> None:
        worker.gone_s = self._clock.now
        self.starting.remove(worker)
        self.gone.append(worker)

    def stop(self, worker: SimulatedWorker) -> None:
        """Let a worker finish its requests for ``drain_s`` seconds, then hand over the rest."""
        worker.state = "leaving"
        self._workers_changed()
        self._drain(worker, self._drain_s)

    def _drain(self, worker: SimulatedWorker, seconds: float) -> None:
        if worker.requests:
            self._clock.at(self._clock.now + seconds, self._hand_over, worker, *_phase(worker))
        else:
            self._on_idle(worker)

    def _hand_over(self, worker: SimulatedWorker, state: str, role_changes: int) -> None:
        if _phase(worker) == (state, role_changes):  # not a later drain
            for request in list(worker.requests):
                self._lifecycle.restart(request, 0.0, died=False)

    def _on_idle(self, worker: SimulatedWorker) -> None:
        if worker.state == "leaving":
            self._remove(worker)
        elif worker.state == "changing" and worker.role != worker.next_role:
            worker.role = worker.next_role
            self._clock.at(self._clock.now + ROLE_S, self._finish_role_change, worker)

    def die(self, worker: SimulatedWorker) -> None:
        """Remove a worker without a drain; its requests notice after NOTICE_S."""
        requests, stayed = list(worker.requests), worker.state != "leaving"
        self._remove(worker)
        if self.replaces and stayed:
            self.start(worker.home)
        for request in requests:
            self._lifecycle.restart(request, NOTICE_S, died=True)

    def _remove(self, worker: SimulatedWorker) -> None:
        worker.state = "gone"
        worker.gone_s = self._clock.now
        worker.cache.clear()
        self.workers.remove(worker)
        self.gone.append(worker)
        self._workers_changed()

    # ---- role changes -----------------------------------------------------------------------

    def lend(self, worker: SimulatedWorker, role: Role, drain_s: float) -> None:
        """Change a worker's role: to decode at once, to prefill when it has drained."""
        if worker.role == role or worker.state != "serving":
            return
        self.loans += 1
        worker.role_changes += 1
        worker.state, worker.next_role = "changing", role
        self._workers_changed()
        if role == "decode":
            worker.role = "decode"
            worker.pump()
            self._clock.at(self._clock.now + ROLE_S, self._finish_role_change, worker)
        else:
            self._drain(worker, drain_s)

    def _finish_role_change(self, worker: SimulatedWorker) -> None:
        if worker.state == "changing":
            worker.state = "serving"
            self._workers_changed()

    # ---- counts -----------------------------------------------------------------------------

    def named(self, name: str) -> SimulatedWorker | None:
        return next((w for w in self.workers if w.name == name), None)

    def count(self, role: Role) -> int:
        """Return the number of workers that serve ``role``."""
        return sum(w.role == role and w.state == "serving" for w in self.workers)

    def gpu_seconds(self, until_s: float, gpus: Mapping[Role, int]) -> float:
        """Return the GPU-seconds up to ``until_s``, starts that were given up included. ``gpus``:
        of a worker by its home."""
        return math.fsum(
            gpus[w.home]
            * max(0.0, min(until_s, math.inf if w.gone_s is None else w.gone_s) - w.asked_s)
            for w in (*self.workers, *self.gone, *self.starting)
        )


def _phase(worker: SimulatedWorker) -> tuple[str, int]:
    """Return what tells one drain of a worker from another one."""
    return worker.state, worker.role_changes
