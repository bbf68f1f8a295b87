"""A scenario, from its beginning until its time is over and the last request has ended."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

from cluster.observation.request_mix import Counter
from cluster.planner.gpus import gpu
from cluster.planner.model_shape import shape
from cluster.planner.roofline import Efficiency, machine
from cluster.simulator.autoscaling import Autoscaler, terms
from cluster.simulator.devices.clock import Clock
from cluster.simulator.devices.fleet import Fleet
from cluster.simulator.devices.job import Job
from cluster.simulator.devices.network import Network
from cluster.simulator.devices.request_life import Life
from cluster.simulator.devices.routing import Router
from cluster.simulator.devices.routing import Terms as Routing
from cluster.simulator.faults import Faults, Starts
from cluster.simulator.result import Result, figures
from cluster.simulator.scenario import MachineSection, Scenario
from cluster.simulator.traffic import requests
from cluster.simulator.watching import Watching
from cluster.sizing.decision import Decision, Record
from cluster.sizing.policy import decide
from cluster.sizing.snapshot import Machine, Snapshot
from protocol.errors import StartupError
from protocol.roles import ROLES, Role
from router.placement.admission import Patience
from router.placement.prefix_index import PrefixIndex
from router.placement.snapshot import Objectives

# MERGED cluster.simulate.machines
# A scenario's machines as the sizing policy knows them.


def machines(scenario: Scenario) -> dict[Role, Machine]:
    """Raises StartupError for a model or a GPU that is not known."""
    of = scenario.machines
    tpot_s = scenario.objectives.tpot_ms / 1e3
    prefill = _machine(of.prefill, tpot_s, of.pace)
    decode = prefill if of.decode is None else _machine(of.decode, tpot_s, of.pace)
    return {"prefill": prefill, "decode": decode}


def _machine(of: MachineSection, tpot_s: float, pace: float) -> Machine:
    link = None if of.link_gb_per_s is None else of.link_gb_per_s * 1e9
    if of.step is not None:
        assert of.kv_tokens is not None and of.kv_bytes is not None
        return Machine(
            step=of.step,
            chunk=of.chunk,
            max_batch=of.max_batch,
            kv_tokens=of.kv_tokens,
            kv_bytes=of.kv_bytes,
            link_bytes_s=link or 0.0,
        )
    assert of.gpu is not None and of.model is not None
    return machine(
        shape(of.model, "fp8", of.weight_bytes),
        gpu(of.gpu, "gpu"),
        context=of.context,
        tpot_s=tpot_s,
        chunk=of.chunk,
        max_batch=of.max_batch,
        pace=pace,
        efficiency=Efficiency(compute=of.compute, bandwidth=of.bandwidth),
        link_bytes_s=link,
        pool=of.kv_tokens,
    )


LONGEST_TAIL_S = 3600.0
"""After the last arrival; what has not ended by then counts as failed."""
MOMENTS = 400
"""In a plot, about."""


@dataclass(frozen=True)
class Simulated:
    """``jobs``: each request as it ended; ``records``: the decisions, where they were wanted."""

    result: Result
    jobs: list[Job]
    records: list[Record]


def simulate(
    scenario: Scenario,
    policy: Callable[[Snapshot], Decision] = decide,
    *,
    keep_records: bool = False,
) -> Simulated:
    """Raises StartupError for a trace, a model or a GPU that cannot be had."""
    began = time.perf_counter()
    of = machines(scenario)
    if scenario.autoscaler.mode == "act" and scenario.autoscaler.gpus is not None:
        _check_budget(scenario)
    jobs = requests(scenario)
    world = World(scenario, of, policy, keep_records)
    with _no_collecting():
        world.run(jobs)
    result = figures(scenario, jobs, world.fleet, world.life, world.watching, world.autoscaler)
    result = result.timed(time.perf_counter() - began, world.clock.events)
    records = world.autoscaler.records if world.autoscaler else []
    return Simulated(result, jobs, records)


@contextmanager
def _no_collecting() -> Iterator[None]:
    """Looking for cycles among all requests, again and again, takes a sixth of the time; none are
    made."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _check_budget(scenario: Scenario) -> None:
    gpus, pools = scenario.autoscaler.gpus, scenario.pools
    if gpus is not None and pools.prefill + pools.decode > gpus:
        raise StartupError(
            f"autoscaler.gpus: {gpus:g}, but pools begin with {pools.prefill + pools.decode}"
        )


class World:
    """All that there is, wired up."""

    def __init__(
        self,
        scenario: Scenario,
        of: dict[Role, Machine],
        policy: Callable[[Snapshot], Decision],
        keep_records: bool,
    ) -> None:
        seed = scenario.seed
        self.goals = scenario.goals
        self._seconds = scenario.seconds or 0.0
        self.clock = clock = Clock()
        self._counter = counter = Counter()
        self.network = network = Network()
        index = PrefixIndex()
        routing = _routing(scenario, of)
        self.router = router = Router(clock, routing, network, index, Random(f"{seed} choice"))
        self.life = Life(clock, router, network, counter, scenario.routing.path_ms / 1e3)
        starts = Starts(scenario.autoscaler, Random(f"{seed} starts"))
        self.fleet = Fleet(
            *(clock, of, scenario.machines.pace, scenario.drain_s, router, self.life, network),
            *(index, Random(f"{seed} fleet"), starts.seconds),
        )
        for role in ROLES:
            for _ in range(scenario.pools.prefill if role == "prefill" else scenario.pools.decode):
                self.fleet.add(role)
        self.autoscaler: Autoscaler | None = None
        self.fleet.replaces = scenario.autoscaler.mode == "act"
        if scenario.autoscaler.mode != "off":
            self.autoscaler = Autoscaler(
                clock, terms(scenario, of), self.fleet, counter, policy, keep=keep_records
            )
        self._faults = Faults(
            *(clock, self.fleet, network, starts, self.autoscaler, Random(f"{seed} faults")),
        )
        self._faults.plan(tuple(e for e in scenario.events if e.kind != "burst"))

    def run(self, jobs: list[Job]) -> None:
        last = max(self._seconds, jobs[-1].at if jobs else 0.0)
        self.watching = Watching(self.clock, self.fleet, max(1.0, last / MOMENTS))
        self.watching.start()
        if self.autoscaler is not None:
            self.clock.at(self.autoscaler.interval_s, self.autoscaler.turn)
        clock, arrive = self.clock, self.life.arrive
        for job in jobs:
            clock.run_before(job.at)
            arrive(job)
        clock.run_before(self._seconds)  # workers cost, and go, when nobody asks any more
        ended = self.life.ended
        while len(ended) < len(jobs) and clock.now < last + LONGEST_TAIL_S:
            if not clock.step():
                break
        for job in jobs:
            if not job.status:
                job.status = "failed"


def _routing(scenario: Scenario, of: dict[Role, Machine]) -> Routing:
    goals = Objectives(scenario.objectives.ttft_ms / 1e3, scenario.objectives.tpot_ms / 1e3)
    routing = scenario.routing
    patience = Patience(
        10 * goals.ttft_s if routing.admission_ttft_ms is None else routing.admission_ttft_ms / 1e3,
        math.inf if routing.admission_queue_ms is None else routing.admission_queue_ms / 1e3,
    )
    return Routing(goals, patience, routing.policy, of["prefill"].kv_bytes)
