"""What a simulated worker does with its requests when its role changes."""

from __future__ import annotations

from typing import Any

import pytest

from bench.lib.routing_policies import least_loaded
from cluster.simulator.devices.request import SimulatedRequest
from cluster.simulator.simulation import Simulation
from protocol.roles import Role
from tests.cluster.simulator.scenarios import NO_DEADLINE, mix, scenario


def world_of(**rest: Any) -> Simulation:
    of = scenario(mix(1), seconds=1, **NO_DEADLINE, **rest)
    return Simulation(of)


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


def test_lent_worker_decodes_while_it_computes_the_prompts_that_it_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt of 30 chunks of 1.01 s; the worker is lent in the first one, and gets sequences."""
    monkeypatch.setattr("cluster.simulator.devices.routing.choose_placement", least_loaded)
    world = world_of(machine={"chunk": 1000}, pools={"prefill": 2, "decode": 1})
    lent = world.fleet.workers[0]
    long = SimulatedRequest(0, 0.0, 30_000, 2)
    short = [SimulatedRequest(i, 2 + 0.1 * i, 100, 2000) for i in range(1, 5)]
    world.clock.at(1.0, world.fleet.lend, lent, "decode", 0.0)
    rows: list[tuple[int, int]] = []
    for at_s in (5, 25):
        world.clock.at(at_s, lambda: rows.append((lent.batch.rows, int(lent.batch.tokens))))
    world.run([long, *short])
    assert lent.computed_prompts == (1.01, 1000)
    (first_rows, first_tokens), (later_rows, later_tokens) = rows
    assert first_rows == later_rows > 0 and first_tokens + 150 < later_tokens
    assert long.first_s == pytest.approx(30 * 1.01, rel=0.2)
