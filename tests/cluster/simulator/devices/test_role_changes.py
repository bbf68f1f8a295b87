"""What a simulated worker does with its requests when its role changes."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.simulator.devices.request import SimulatedRequest
from cluster.simulator.simulation import Simulation, scenario_machines
from cluster.sizing.policy import decide
from protocol.roles import Role
from tests.cluster.simulator.scenarios import NO_DEADLINE, mix, scenario


def world_of(**rest: Any) -> Simulation:
    of = scenario(mix(1), seconds=1, **NO_DEADLINE, **rest)
    return Simulation(of, scenario_machines(of), decide, False)


def add_worker(world: Simulation, home: Role) -> None:
    world.fleet.add(home)


def test_drain_of_an_earlier_loan_does_not_end_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both loans have 30 s; the first one, at 1 s, needs only the two seconds of its request."""
    world = world_of()
    lent = world.fleet.workers[-1]
    moved: list[float] = []
    restart = world.lifecycle.restart

    def record(request: SimulatedRequest, after_s: float, *, died: bool) -> None:
        moved.append(world.clock.now)
        restart(request, after_s, died=died)

    monkeypatch.setattr(world.lifecycle, "restart", record)
    for at_s, role in ((1.0, "prefill"), (5.0, "decode"), (20.0, "prefill")):
        world.clock.at(at_s, world.fleet.lend, lent, role, 30.0)
    world.clock.at(6.0, add_worker, world, "prefill")
    world.clock.at(19.9, add_worker, world, "decode")
    world.run([SimulatedRequest(0, 0.1, 100, 200), SimulatedRequest(1, 7.0, 100, 8000)])
    assert moved == [50.0]
