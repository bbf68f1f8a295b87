"""Seeds of the simulator of faults: the cluster keeps its promises under all of them.

``python -m tests.simulation --seed N --trace`` replays a failure, here and anywhere else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.simulation.faults import Fault
from tests.simulation.profiles import DEATHS, HANG_UPS, MIXED, seeds_of
from tests.simulation.runner import SeedResult, Simulation

pytestmark = pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")

SEEDS = 600
MANY_SEEDS = 200_000
PARTS = 8
"""Tests that share the seeds, so that the slowest test of the suite is none of them."""

LONGEST_S = 14_400
"""Limit of all seeds of ``make test-long``: some 50 ms of one core each."""


@pytest.fixture(scope="module")
def simulation() -> Iterator[Simulation]:
    simulation = Simulation()
    with simulation.patched():
        yield simulation


def describe(result: SeedResult) -> str:
    lines = "\n  ".join(result.violations[:8])
    return f"replay: python -m tests.simulation --seed {result.seed} --trace\n  {lines}"


@pytest.mark.parametrize("part", range(PARTS))
def test_no_seed_breaks_an_invariant(simulation: Simulation, part: int) -> None:
    for seed in range(part, SEEDS, PARTS):
        result = simulation.run(seed)
        assert not result.violations, describe(result)


@pytest.mark.long
@pytest.mark.timeout(LONGEST_S)
def test_no_seed_of_many_breaks_an_invariant() -> None:
    """All cores run seeds beyond those of the test above."""
    cores = os.cpu_count() or 1
    each = -(-MANY_SEEDS // cores)
    starts = range(SEEDS, SEEDS + MANY_SEEDS, each)
    command = [sys.executable, "-m", "tests.simulation", "--count", str(each), "--seed"]
    running = [
        subprocess.Popen([*command, str(start)], stdout=subprocess.PIPE, text=True)
        for start in starts
    ]
    try:
        said = [process.communicate(timeout=LONGEST_S)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert not any(process.returncode for process in running), "\n".join(said)


def test_an_engine_that_dies_while_it_loads_is_replaced(simulation: Simulation) -> None:
    """The worker gives up after several deaths, whenever they come, and not because of one."""
    kills = [Fault(at, "kill engine", "d0", "", 0.0) for at in (0.1, 0.2)]
    result = simulation.run(seeds_of(DEATHS, 1)[0], kills)
    assert not result.violations, describe(result)
    assert not [line for line in result.trace if "gives up" in line]


def test_a_seed_replays_exactly_in_another_process(simulation: Simulation) -> None:
    seeds = [*seeds_of(MIXED, 2), *seeds_of(HANG_UPS, 1)]
    here = [simulation.run(seed).digest for seed in seeds]
    assert here == [simulation.run(seed).digest for seed in seeds]
    program = (
        "from tests.simulation.runner import Simulation\n"
        "simulation = Simulation()\n"
        "with simulation.patched():\n"
        f"    print(*[simulation.run(seed).digest for seed in {seeds}])\n"
    )
    # Text has other hashes there, and objects other addresses.
    other = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert other.stdout.split() == here


def test_the_faults_reach_what_they_are_for(simulation: Simulation) -> None:
    """Requests are handed over, started again and preempted: the seeds are no idle cluster."""
    results = [simulation.run(seed) for seed in range(40)]
    text = "\n".join(line for result in results for line in result.trace)
    for event in ("fault: kill engine", "fault: cut", "suspects", "hangs up", "UNAVAILABLE"):
        assert event in text, event
    outcomes = [outcome for result in results for outcome in result.outcomes]
    finished = sum(outcome in ("stop", "length") for outcome in outcomes)
    assert finished > 0.6 * len(outcomes), outcomes
