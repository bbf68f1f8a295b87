"""Events that overlap last as long as each of them says, and end without a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench.lib.routing_policies import least_loaded
from cluster.simulator.devices.request import SimulatedRequest
from cluster.simulator.simulation import Simulation
from tests.cluster.simulator.scenarios import NO_DEADLINE, mix, scenario


def at_times(times: list[float], events: list[dict[str, Any]], look: str) -> list[Any]:
    """Return what ``look`` shows of the simulation at each time."""
    of = scenario(
        mix(1), seconds=30, machine={"link_gb_per_s": 1}, autoscaler={"mode": "advise"},
        events=events,
    )  # fmt: skip
    world = Simulation(of)
    looks: dict[str, Callable[[], Any]] = {
        "link": lambda: world.network.rates[0],
        "start_s": lambda: world.fleet._start_s(),
        "blind": lambda: world.autoscaler is not None and world.autoscaler.blind,
    }
    found = []
    for at in times:
        world.clock.run_before(at)
        found.append(looks[look]())
    return found


def test_slow_links_multiply_and_end_at_their_speed() -> None:
    events = [
        {"kind": "slow_link", "at_s": 5, "for_s": 10, "pool": "prefill", "share": 0.1},
        {"kind": "slow_link", "at_s": 10, "for_s": 10, "pool": "prefill", "share": 0.5},
    ]
    assert at_times([4, 7, 12, 17, 25], events, "link") == [1e9, 1e8, 5e7, 5e8, 1e9]


def test_starts_fail_until_the_last_event_ends() -> None:
    events = [
        {"kind": "no_start", "at_s": 5, "for_s": 20},
        {"kind": "no_start", "at_s": 10, "for_s": 5},
    ]
    assert at_times([4, 7, 12, 17, 27], events, "start_s") == [60, None, None, None, 60]


def test_starts_take_what_the_latest_slow_start_says() -> None:
    events = [
        {"kind": "slow_start", "at_s": 5, "for_s": 20, "start_s": 100},
        {"kind": "slow_start", "at_s": 10, "for_s": 5, "start_s": 300},
    ]
    assert at_times([4, 7, 12, 17, 27], events, "start_s") == [60, 100, 300, 100, 60]


def test_metrics_are_missing_until_the_last_event_ends() -> None:
    events = [
        {"kind": "blind", "at_s": 5, "for_s": 20},
        {"kind": "blind", "at_s": 10, "for_s": 5},
    ]
    assert at_times([4, 7, 17, 27], events, "blind") == [False, True, True, False]


def test_a_worker_that_leaves_when_another_one_dies_cannot_die_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The leaving worker waits for the KV of one prompt, which the first death takes from it."""
    monkeypatch.setattr("cluster.simulator.devices.routing.choose_placement", least_loaded)
    of = scenario(
        mix(1), seconds=20, pools={"prefill": 2, "decode": 1}, autoscaler={"start_s": 1},
        events=[{"kind": "die", "at_s": 5, "pool": "prefill", "count": 2}], **NO_DEADLINE,
    )  # fmt: skip
    world = Simulation(of)
    computing, lent, decode = world.fleet.workers
    world.clock.at(0.1, lambda: world.fleet.lend(lent, "decode", 0))
    world.clock.at(1.0, lambda: world.fleet.stop(decode))
    world.clock.at(1.9, lambda: world.fleet.start("decode"))
    world.clock.at(3.0, lambda: world.fleet.stop(lent))
    request = SimulatedRequest(0, 2.0, 8000, 10)
    world.run([request])
    assert computing.state == lent.state == "gone" and request.deaths == 1
    assert request.status == "ok"
