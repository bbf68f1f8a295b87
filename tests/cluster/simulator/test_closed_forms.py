"""What the simulator says where theory knows the answer."""

from __future__ import annotations

import pytest

from bench.lib.routing_policies import least_loaded
from cluster.simulator.simulation import simulate
from router.placement.cost import LOCAL_PATH_S
from tests.cluster.simulator.scenarios import PATH_S, mix, scenario

NO_DEADLINE = {"routing": {"admission_ttft_ms": 1e9}}


@pytest.fixture
def remote_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts always go to prefill workers."""
    monkeypatch.setattr("cluster.simulator.devices.routing.choose_placement", least_loaded)


@pytest.mark.parametrize("load", [0.5, 0.9])
@pytest.mark.usefixtures("remote_prefill")
def test_a_single_prefill_worker_waits_as_lindley_says(load: float) -> None:
    """W' = max(0, W + S - gap), request by request (Lindley, 1952)."""
    service_s = 0.01 + 0.1
    simulated = simulate(scenario(mix(load / service_s, output=1), seconds=100, **NO_DEADLINE))
    waits, wait_s, before = [], 0.0, 0.0
    for job in simulated.requests:
        wait_s = max(0.0, wait_s + service_s - (job.at - before)) if waits else 0.0
        before = job.at
        waits.append(wait_s)
    told = [job.ttft_s - PATH_S - service_s for job in simulated.requests if job.ttft_s is not None]
    assert told == pytest.approx(waits, abs=1e-6)


@pytest.mark.usefixtures("remote_prefill")
def test_a_single_prefill_worker_waits_as_an_m_d_1_queue() -> None:
    """Mean wait rho*S/(2*(1 - rho)): Pollaczek-Khinchine for a constant service time."""
    service_s, load = 0.11, 0.5
    result = simulate(scenario(mix(load / service_s, output=1), seconds=3000, **NO_DEADLINE)).result
    wait_s = load * service_s / (2 * (1 - load))
    assert result.requests > 2000
    assert result.ttft.mean - PATH_S - service_s == pytest.approx(wait_s, rel=0.15)
    assert result.busy_prefill == pytest.approx(load, rel=0.03)


@pytest.mark.usefixtures("remote_prefill")
def test_the_time_per_token_of_a_batch_that_stays_the_same_is_a_step() -> None:
    """No KV cost, no cost of a row: every step takes the same, whoever joins."""
    of = scenario(mix(5, output=500), seconds=20, machine={"link_gb_per_s": 1e6}, **NO_DEADLINE)
    simulated = simulate(of)
    for job in simulated.requests:
        assert job.tpot_s is not None
        # The first token is PATH_S on its way, and up to a step passes until it joins.
        seconds = job.tpot_s * 499 + PATH_S
        assert 499 * 0.01 - 1e-9 <= seconds <= 500 * 0.01 + 1e-6


@pytest.mark.usefixtures("remote_prefill")
def test_steps_grow_with_rows_and_kv_as_told() -> None:
    step = [0.01, 0.001, 1e-5, 0.001, 0.0]
    of = scenario(
        mix(1, arrivals="constant", prompt=100, output=101),
        seconds=1,
        machine={"step": step},
        **NO_DEADLINE,
    )
    (job,) = simulate(of).requests
    seconds = sum(0.011 + 1e-5 * (101 + k) for k in range(100))
    assert job.done_s is not None and job.first_s is not None
    assert job.done_s - job.first_s + PATH_S == pytest.approx(seconds)


@pytest.mark.usefixtures("remote_prefill")
def test_kv_takes_its_time_over_a_slow_link() -> None:
    """1000 tokens of 1 MB at 1 GB/s: what does not go while the prompt is computed delays the
    second token, not the first."""
    machine = {"kv_bytes": 1e6, "link_gb_per_s": 1.0, "chunk": 100}
    of = scenario(
        mix(0.01, arrivals="constant", prompt=1000, output=2), seconds=1, machine=machine,
        **NO_DEADLINE,
    )  # fmt: skip
    (job,) = simulate(of).requests
    prefill_s = 10 * 0.01 + 1.0
    assert job.ttft_s == pytest.approx(prefill_s + PATH_S)
    # Of 1 GB 900 MB may go before the first token, in 1.1 s; the last chunk's 100 MB take 0.1 s.
    assert job.done_s == pytest.approx(prefill_s + 0.1 + 0.01)


def test_a_prompt_alone_with_a_decode_worker_takes_its_steps_there() -> None:
    of = scenario(
        mix(0.01, arrivals="constant", prompt=250, output=3), seconds=1, machine={"chunk": 100},
        pools={"prefill": 0, "decode": 1},
    )  # fmt: skip
    (job,) = simulate(of).requests
    assert job.ttft_s == pytest.approx(3 * 0.01 + 0.25 + LOCAL_PATH_S)
    assert job.done_s == pytest.approx(3 * 0.01 + 0.25 + 2 * 0.01)


def test_prompts_take_of_a_batch_s_steps_what_the_budget_leaves() -> None:
    """A step of 10 ms under an objective of 50 ms has room for 40 tokens of an urgent prompt."""
    of = scenario(
        mix(1, arrivals="constant", prompt=100, output=400),
        mix(1, arrivals="constant", prompt=400, output=2, from_s=1.5, for_s=0.5),
        seconds=2,
        pools={"prefill": 0, "decode": 1},
        objectives={"ttft_ms": 40, "tpot_ms": 50},
        **NO_DEADLINE,
    )
    late = next(job for job in simulate(of).requests if job.prompt == 400)
    assert late.ttft_s == pytest.approx(10 * 0.05 + LOCAL_PATH_S, abs=0.011)
