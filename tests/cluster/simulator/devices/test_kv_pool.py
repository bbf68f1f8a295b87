"""What the pool of a simulated worker holds and promises, and who gets its room."""

from __future__ import annotations

from typing import Any

import pytest

from bench.lib.routing_policies import least_loaded
from cluster.simulator.devices.request import SimulatedRequest
from cluster.simulator.simulation import Simulation
from tests.cluster.simulator.scenarios import MACHINE, NO_DEADLINE, mix, scenario


@pytest.fixture
def remote_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts always go to prefill workers."""
    monkeypatch.setattr("cluster.simulator.devices.routing.choose_placement", least_loaded)


def world_of(**rest: Any) -> Simulation:
    of = scenario(mix(1), seconds=1, **NO_DEADLINE, **rest)
    return Simulation(of)


def free_at_router(world: Simulation, at_s: float, jobs: list[SimulatedRequest]) -> int:
    """Return the free tokens of the last worker's pool that its router sees at a time."""
    (router,), decode = world.routers, world.fleet.workers[-1]
    free: list[int] = []
    world.clock.at(at_s, lambda: free.append(router._decode_load(decode)[2]))
    world.run(jobs)
    assert {job.status for job in jobs} == {"ok"}
    return free[0]


@pytest.mark.usefixtures("remote_prefill")
def test_router_sees_what_a_computed_prompt_that_waits_for_room_will_take() -> None:
    """The second prompt is computed after 5 s; the first request has its room until 31 s."""
    world = world_of(machine={"kv_tokens": 5500}, pools={"prefill": 2, "decode": 1})
    jobs = [SimulatedRequest(0, 0.0, 1000, 3000), SimulatedRequest(1, 0.1, 5000, 2)]
    assert free_at_router(world, 10.0, jobs) == 0
    assert jobs[1].computed_s is not None and jobs[1].computed_s < 10 < (jobs[1].reserved_s or 0.0)


@pytest.mark.usefixtures("remote_prefill")
def test_router_sees_reserved_room_once_while_the_prompt_is_computed() -> None:
    world = world_of(machine={"kv_tokens": 5500})
    assert free_at_router(world, 0.5, [SimulatedRequest(0, 0.0, 1000, 3000)]) == 5500 - 1001


def test_shared_blocks_take_room_once_until_their_last_holder_has_ended() -> None:
    """Three requests of 2048 + 52 tokens fit a pool of 3000 at once, as two blocks are missing."""
    world = world_of(machine={"kv_tokens": 3000}, pools={"prefill": 0, "decode": 1})
    (worker,) = world.fleet.workers
    shared = tuple(bytes([n]) for n in range(4))
    jobs = [SimulatedRequest(i, 0.001 * i, 2100, 40 + 10 * i, shared) for i in range(3)]
    used: list[int] = []
    world.clock.at(2.5, lambda: used.append(worker.pool.used_tokens))
    world.run(jobs)
    first, second, third = [job.done_s or 0.0 for job in jobs]
    assert first < second < third < 2.1 + 3 * 0.1 + 0.01 * 65
    assert world.lifecycle.preempted == 0
    assert 2048 + 3 * 53 <= used[0] < 2300
    assert worker.pool.used_tokens == 0


@pytest.mark.usefixtures("remote_prefill")
def test_room_that_the_first_request_in_line_gives_up_goes_to_the_next_one() -> None:
    """Two requests wait behind a long one that takes 9500 tokens; its client leaves at 12 s."""
    world = world_of(machine={"kv_tokens": 10_000}, pools={"prefill": 2, "decode": 1})
    jobs = [SimulatedRequest(0, 0, 1000, 3000), SimulatedRequest(1, 1.2, 9500, 3)]
    jobs.append(SimulatedRequest(2, 1.3, 500, 3))
    world.clock.at(12.0, lambda: world.lifecycle.restart(jobs[1], 0.25, died=True))
    world.run(jobs)
    assert [job.status for job in jobs] == ["ok"] * 3
    assert jobs[2].reserved_s == 12.0


@pytest.mark.parametrize(
    ("prefill", "decode", "fits"),
    [(1501, 2400, True), (1500, 2400, False), (1501, 2399, False), (2400, 1501, False)],
)
def test_request_is_too_long_for_a_pool_that_one_of_the_roles_has(
    prefill: int, decode: int, fits: bool
) -> None:
    """Prefill holds a prompt of 1500 tokens and the first output token, decode all 2400."""
    machines = {"prefill": {**MACHINE, "kv_tokens": prefill}}
    machines["decode"] = {**MACHINE, "kv_tokens": decode}
    world = world_of(machines=machines)
    request = SimulatedRequest(0, 0.0, 1500, 900)
    world.run([request])
    assert request.status == ("ok" if fits else "too_long")
