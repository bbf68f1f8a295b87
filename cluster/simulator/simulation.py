"""Runs a scenario until its time is over and the last request has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from msgspec.structs import replace

from cluster.observation.request_mix import RequestCounter
from cluster.planner.gpus import find_gpu
from cluster.planner.model_shape import find_model
from cluster.planner.roofline import ASSUMED, Efficiency, machine_model
from cluster.simulator.autoscaling import SimulatedAutoscaler
from cluster.simulator.devices.clock import SimulatedClock
from cluster.simulator.devices.fleet import SimulatedFleet
from cluster.simulator.devices.lifecycle import RequestLifecycle
from cluster.simulator.devices.network import SimulatedNetwork
from cluster.simulator.devices.request import SimulatedRequest
from cluster.simulator.devices.routing import RoutingTerms, SimulatedRouter
from cluster.simulator.faults import ColdStarts, FaultInjector
from cluster.simulator.fleet_sampler import FleetSampler
from cluster.simulator.result import SimulationResult, summarize_run
from cluster.simulator.scenario import MachineSection, Scenario
from cluster.simulator.traffic import scenario_requests
from cluster.sizing.decision import DecisionRecord, ScalingDecision
from cluster.sizing.policy import decide
from cluster.sizing.snapshot import MachineModel, SizingSnapshot
from protocol.errors import UsageError
from protocol.garbage_collection import without_garbage_collection
from protocol.performance.step_model import DEFAULT_CHUNK
from protocol.roles import ROLES, Role
from router.placement.admission import admission_limits
from router.placement.prefix_index import PrefixIndex
from router.placement.snapshot import Objectives

LONGEST_TAIL_S = 3600.0
"""Seconds after the last arrival; a request that has not ended by then counts as failed."""
SAMPLES = 400
"""Approximate number of fleet samples, the points of a plot."""
_DEFAULT_BATCH = 64  # sequences in a step of a machine that is given by its coefficients


@dataclass(frozen=True)
class SimulationRun:
    """``requests``: each request as it ended; ``records``: the decisions, if they were kept."""

    result: SimulationResult
    requests: list[SimulatedRequest]
    records: list[DecisionRecord]


def simulate(
    scenario: Scenario,
    policy: Callable[[SizingSnapshot], ScalingDecision] = decide,
    *,
    keep_records: bool = False,
) -> SimulationRun:
    """Run the scenario. Raises StartupError for a trace, model or GPU that cannot be had."""
    began = time.perf_counter()
    _check_budget(scenario)
    world = Simulation(scenario, policy, keep_records=keep_records)
    requests = scenario_requests(scenario)
    with without_garbage_collection():  # a sixth of the time: requests are in no cycles
        world.run(requests)
    result = summarize_run(
        scenario, requests, world.fleet, world.lifecycle, world.sampler, world.autoscaler
    )
    result = replace(result, wall_s=time.perf_counter() - began, events=world.clock.events)
    records = world.autoscaler.records if world.autoscaler else []
    return SimulationRun(result, requests, records)


def scenario_machines(scenario: Scenario) -> dict[Role, MachineModel]:
    """Return the machine of each pool. Raises StartupError for an unknown model or GPU."""
    return {role: _machine(scenario.machines.of(role), role) for role in ROLES}


def _machine(section: MachineSection, role: Role) -> MachineModel:
    link = None if section.link_gb_per_s is None else section.link_gb_per_s * 1e9
    if section.step is not None:
        assert section.kv_tokens is not None and section.kv_bytes is not None
        return MachineModel(
            step=section.step,
            chunk=section.chunk or DEFAULT_CHUNK,
            max_batch=section.max_batch or _DEFAULT_BATCH,
            kv_tokens=section.kv_tokens,
            kv_bytes=section.kv_bytes,
            link_bytes_s=link or 0.0,
            speculation=section.speculation,
        )
    assert section.gpu is not None and section.model is not None
    shape_of = partial(
        find_model, precision=section.kv_precision, weight_bytes=section.weight_bytes
    )
    machine = machine_model(
        shape_of(section.model),
        find_gpu(section.gpu, "gpu").group(section.tp),
        role,
        context=section.context,
        chunk=section.chunk,
        max_batch=section.max_batch,
        efficiency=Efficiency(
            compute=section.compute, bandwidth=section.bandwidth or ASSUMED.bandwidth
        ),
        link_bytes_s=link,
        pool=section.kv_tokens,
        draft=None if section.draft is None else shape_of(section.draft),
    )
    return replace(machine, speculation=section.speculation)


def _check_budget(scenario: Scenario) -> None:
    section, each = scenario.autoscaler, scenario.machines.gpus
    gpus = sum(each[role] * getattr(scenario.pools, role) for role in ROLES)
    if section.mode == "act" and section.gpus is not None and gpus > section.gpus:
        raise UsageError(f"autoscaler.gpus: {section.gpus:g}, but pools begin with {gpus}")


class Simulation:
    """All parts of a simulated cluster, connected to each other."""

    def __init__(
        self,
        scenario: Scenario,
        policy: Callable[[SizingSnapshot], ScalingDecision] = decide,
        *,
        keep_records: bool = False,
    ) -> None:
        machines = scenario_machines(scenario)
        seed, section = scenario.seed, scenario.autoscaler
        self.goals = scenario.goals
        self._seconds = scenario.seconds or 0.0
        self._warm_up_s = scenario.warm_up_s
        self.clock = clock = SimulatedClock()
        counter = RequestCounter()
        self.network = network = SimulatedNetwork()
        index = PrefixIndex()
        terms = _routing_terms(scenario, machines)
        path_s, count = scenario.routing.path_ms / 1e3, scenario.routing.routers
        self.routers = routers = [
            SimulatedRouter(clock, terms, index, Random(f"{seed} choice{n or ''}"))
            for n in range(count)
        ]
        for router in routers:
            router.others = [other for other in routers if other is not router]
        self._load_age_s = scenario.routing.load_age_ms / 1e3
        self.lifecycle = RequestLifecycle(clock, routers, network, counter, path_s)
        starts = ColdStarts(section, Random(f"{seed} starts"))
        self.fleet = SimulatedFleet(
            *(clock, machines, scenario.drain_s, routers, self.lifecycle),
            *(network, index, Random(f"{seed} fleet"), starts.seconds),
        )
        for role in ROLES:
            for _ in range(scenario.pools.prefill if role == "prefill" else scenario.pools.decode):
                self.fleet.add(role)
        self.fleet.replaces = section.mode == "act"
        self.autoscaler: SimulatedAutoscaler | None = None
        if section.mode != "off":
            self.autoscaler = SimulatedAutoscaler(
                clock, scenario, machines, self.fleet, counter, policy, keep=keep_records
            )
        faults = FaultInjector(
            clock, self.fleet, network, starts, self.autoscaler, Random(f"{seed} faults")
        )
        faults.schedule(tuple(e for e in scenario.events if e.kind != "burst"))
        if self._load_age_s:
            self._report_loads()

    def _report_loads(self) -> None:
        """Bring all workers' loads to all routers, and again when these are old."""
        for router in self.routers:
            for worker in self.fleet.workers:
                router.take_report(worker)
        self.clock.at(self.clock.now + self._load_age_s, self._report_loads)

    def _end_warm_up(self) -> None:
        """Begin to count anew what the result says; the fleet's GPU-seconds have their times."""
        self.sampler.reset_sums()
        self.lifecycle.moved = self.lifecycle.preempted = self.fleet.loans = 0
        if self.autoscaler is not None:
            self.autoscaler.reasons.clear()

    def run(self, requests: list[SimulatedRequest]) -> None:
        last = max(self._seconds, requests[-1].at if requests else 0.0)
        self.sampler = FleetSampler(self.clock, self.fleet, max(1.0, last / SAMPLES))
        self.sampler.start()
        if self._warm_up_s:
            self.clock.at(self._warm_up_s, self._end_warm_up)
        if self.autoscaler is not None:
            self.clock.at(self.autoscaler.settings.interval_s, self.autoscaler.turn)
        clock, arrive = self.clock, self.lifecycle.arrive
        for request in requests:
            clock.run_before(request.at)
            arrive(request)
        clock.run_before(self._seconds)  # workers cost, and may stop, after the last request
        ended = self.lifecycle.ended
        while len(ended) < len(requests) and clock.now < last + LONGEST_TAIL_S:
            if not clock.step():
                break
        for request in requests:
            if not request.status:
                request.status = "failed"


def _routing_terms(scenario: Scenario, machines: dict[Role, MachineModel]) -> RoutingTerms:
    goals, routing = scenario.goals, scenario.routing
    given = routing.admission_ttft_ms, routing.admission_queue_ms
    ttft_s, queue_s = (None if ms is None else ms / 1e3 for ms in given)
    return RoutingTerms(
        Objectives(goals.ttft_s, goals.tpot_s),
        admission_limits(goals.ttft_s, ttft_s, queue_s),
        machines["prefill"].kv_bytes,
        routing.routers,
    )
