"""What the simulator says where theory knows the answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.lib.routing_policies import least_loaded
from cluster.simulator.devices.request import SimulatedRequest
from cluster.simulator.devices.router_queue import OnDispatch, RouterQueue
from cluster.simulator.scenario import parse_scenario
from cluster.simulator.simulation import Simulation, simulate
from cluster.simulator.traffic import scenario_requests
from router.placement.cost import LOCAL_PATH_S
from router.placement.expected_prefixes import ExpectedPrefixes
from router.placement.ledger import WorkLedger
from tests.cluster.simulator.scenarios import MACHINE, NO_DEADLINE, PATH_S, mix, scenario

ONE_BY_ONE = {"chunk": 100}  # a prompt of 100 tokens fills a prefill step


@pytest.fixture
def remote_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts always go to prefill workers."""
    monkeypatch.setattr("cluster.simulator.devices.routing.choose_placement", least_loaded)


@pytest.fixture
def no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts go to workers as they arrive."""

    def enter(
        queue: RouterQueue, request: SimulatedRequest, limits: object, on_dispatch: OnDispatch,
        on_refused: object,
    ) -> None:  # fmt: skip
        routed = request.router.route(request)
        assert routed is not None
        on_dispatch(request, routed.placement)

    monkeypatch.setattr(RouterQueue, "enter", enter)


@pytest.mark.parametrize("load", [0.5, 0.9])
@pytest.mark.usefixtures("remote_prefill")
def test_a_single_prefill_worker_waits_as_lindley_says(load: float) -> None:
    """W' = max(0, W + S - gap), request by request (Lindley, 1952)."""
    service_s = 0.01 + 0.1
    of = scenario(mix(load / service_s, output=1), seconds=100, machine=ONE_BY_ONE, **NO_DEADLINE)
    simulated = simulate(of)
    waits: list[float] = []
    wait_s = before = 0.0
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
    of = scenario(mix(load / service_s, output=1), seconds=3000, machine=ONE_BY_ONE, **NO_DEADLINE)
    result = simulate(of).result
    wait_s = load * service_s / (2 * (1 - load))
    assert result.requests > 2000
    assert result.ttft.mean - PATH_S - service_s == pytest.approx(wait_s, rel=0.15)
    assert result.busy_prefill == pytest.approx(load, rel=0.03)


@pytest.mark.usefixtures("remote_prefill")
def test_a_long_step_counts_as_busy_while_it_runs() -> None:
    """Prompts of 10 s in steps of 0.11 s, which are one event; samples are taken each second."""
    of = scenario(mix(0.05, prompt=9_100, output=1), seconds=400, machine=ONE_BY_ONE, **NO_DEADLINE)
    result = simulate(of).result
    busy_s = sum(moment.busy_prefill for moment in result.moments)
    assert result.requests > 10
    assert busy_s == pytest.approx(91 * 0.11 * result.requests, abs=11)


def prefilled(*prompts: tuple[int, tuple[bytes, ...]]) -> list[float]:
    """Return when the prompts (tokens, blocks), which arrive at once, are computed by one worker
    that computes 1024 tokens in a step."""
    of = scenario(mix(1), machine={"chunk": 1024}, **NO_DEADLINE)
    world = Simulation(of)
    jobs = [SimulatedRequest(i, 0.0, n, 1, blocks) for i, (n, blocks) in enumerate(prompts)]
    world.run(jobs)
    return [job.ttft_s - PATH_S for job in jobs if job.ttft_s is not None]


@pytest.mark.usefixtures("remote_prefill", "no_queue")
def test_short_prompts_share_a_prefill_step_and_a_long_one_gives_them_its_rest() -> None:
    told = prefilled((100, ()), (300, ()), (300, ()), (424 + 1024, ()), (300, ()))
    first, both = 0.11, 0.11 + 0.01 + 1.024  # the first one was there before the others
    assert told == pytest.approx([first, both, both, both + 0.01 + 1.024, both + 0.02 + 1.324])


@pytest.mark.usefixtures("remote_prefill", "no_queue")
def test_a_short_prompt_shares_the_next_step_of_a_long_one() -> None:
    """The first prompt takes ten steps; the second, of an eighth of a step, comes in the third."""
    of = scenario(mix(1), machine={"chunk": 1024}, **NO_DEADLINE)
    world = Simulation(of)
    jobs = [SimulatedRequest(0, 0.0, 10 * 1024, 1), SimulatedRequest(1, 2.5, 128, 1)]
    world.run(jobs)
    long_s, short_s = (job.at + job.ttft_s - PATH_S for job in jobs if job.ttft_s is not None)
    step_s = 0.01 + 1.024
    assert short_s == pytest.approx(4 * step_s)
    assert long_s == pytest.approx(10 * step_s + 0.01 + 0.128)


@pytest.mark.usefixtures("remote_prefill", "no_queue")
def test_a_prompt_waits_for_its_prefix_that_another_one_brings() -> None:
    one, other = bytes(16), bytes(15) + b"1"
    told = prefilled((100, ()), (513, (one,)), (513, (one,)), (300, (other,)))
    assert told == pytest.approx([0.11, 0.633, 0.633 + 0.01 + 0.301, 0.633 + 0.01 + 0.301])


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


def test_a_full_pool_preempts_the_newest_until_the_older_one_has_ended() -> None:
    """Two sequences of 700 tokens fill a pool of 1000 when each has 400 tokens of its output; the
    newer one waits while the older one gets its last 200."""

    def ended(pool_tokens: int) -> tuple[list[float], int]:
        of = scenario(mix(1), machine={"kv_tokens": pool_tokens}, pools={"prefill": 0, "decode": 1})
        world = Simulation(of)
        jobs = [SimulatedRequest(i, 0.2 * i, 100, 600) for i in range(2)]
        world.run(jobs)
        return [job.done_s or 0.0 for job in jobs], world.lifecycle.preempted

    (older_s, newer_s), preempted = ended(1000)
    calm, none = ended(2000)
    assert preempted > 0 and not none
    assert older_s == pytest.approx(calm[0], abs=0.05)
    # The older one's last 200 tokens evict as many of the newer one, which are computed again.
    assert newer_s - calm[1] == pytest.approx(200 * 0.01 + 200 * 0.001, abs=0.1)
    assert preempted == 1


@pytest.mark.usefixtures("no_queue")
def test_a_full_pool_preempts_the_newest_prompt_until_the_older_sequence_has_ended() -> None:
    """The older request has 20 of its 600 tokens when the newer prompt takes room for 701."""
    machine = {"kv_tokens": 828, "chunk": 50}
    of = scenario(mix(1), machine=machine, pools={"prefill": 0, "decode": 1})
    world = Simulation(of)
    older, newer = SimulatedRequest(0, 0.0, 100, 600), SimulatedRequest(1, 0.3, 700, 2)
    world.run([older, newer])
    assert world.lifecycle.preempted == 1
    assert older.done_s is not None and newer.first_s is not None
    assert newer.first_s > older.done_s and newer.uncached > 300
    assert newer.emitted + newer.left == 2


def siblings_of_a_cold_prompt(prefill: int) -> list[SimulatedRequest]:
    """Return eight requests that came within 10 ms and share a prefix that takes five seconds."""
    of = scenario(
        mix(800, prompt=5220, prefix=5120, arrivals="constant", for_s=0.01),
        pools={"prefill": prefill, "decode": 8},
        machine={"chunk": 512},
        objectives={"ttft_ms": 20_000, "tpot_ms": 500},
    )
    siblings = simulate(of).requests
    assert len(siblings) == 8
    assert sum(s.uncached for s in siblings) == 5220 + 7 * 100
    return siblings


@pytest.mark.parametrize("prefill", [8, 0])
@pytest.mark.usefixtures("no_queue")
def test_siblings_of_a_cold_prompt_go_to_the_worker_that_computes_it(prefill: int) -> None:
    siblings = siblings_of_a_cold_prompt(prefill)
    assert len({(s.prefill or s.decode) for s in siblings}) == 1


@pytest.mark.parametrize("prefill", [8, 0])
def test_siblings_that_wait_for_their_turn_compute_the_prefix_once(prefill: int) -> None:
    """Those that wait in the router until it is computed may fetch it from there."""
    assert all(s.status == "ok" for s in siblings_of_a_cold_prompt(prefill))


def test_an_overload_fills_the_queue_of_the_router_and_not_of_the_worker() -> None:
    """Prompts of 1 s come at twice the rate at which one worker computes them."""
    of = scenario(
        mix(2, prompt=1000, output=2, arrivals="constant"),
        seconds=30,
        machine={"chunk": 1000},
        objectives={"ttft_ms": 3000, "tpot_ms": 100},
    )
    world = Simulation(of)
    queued: list[tuple[int, int]] = []

    def look() -> None:
        at_workers = sum(w.uncomputed_tokens for w in world.fleet.workers)
        queued.append((world.routers[0].queue.prompt_tokens, at_workers))

    for second in range(5, 30):
        world.clock.at(second, look)
    requests = scenario_requests(of)
    world.run(requests)
    assert all(in_router > 0 for in_router, _ in queued)
    assert max(at_workers for _, at_workers in queued) <= 2000  # one is computed by each
    statuses = {r.status for r in requests}
    assert statuses == {"ok", "refused"}


def test_an_overload_of_decode_workers_alone_leaves_what_is_served_in_time() -> None:
    """Two that compute five prompts/s each get 14. They once took every prompt, and few came in
    time."""
    of = scenario(
        mix(14, prompt=1000, output=2),
        pools={"prefill": 0, "decode": 2},
        seconds=60,
        machine={"chunk": 1000, "step": [0.0, 1e-4, 0, 2e-4, 0]},
        objectives={"ttft_ms": 2000, "tpot_ms": 100},
    )
    result = simulate(of).result
    assert result.ok + result.refused == result.requests
    assert result.both_met > 0.5
    assert result.ttft.p50 < 2.0


@pytest.mark.parametrize("routers", [1, 4])
def test_decode_workers_with_time_to_spare_compute_prompts_in_an_overload(routers: int) -> None:
    """Prefill workers compute 10 of 22 prompts/s, and would be awaited by all."""
    of = scenario(
        mix(22, prompt=1000, output=20),
        pools={"prefill": 2, "decode": 3},
        seconds=60,
        machine={"chunk": 500, "step": [0.002, 1e-4, 0, 2e-4, 0]},
        objectives={"ttft_ms": 1500, "tpot_ms": 100},
        routing={"routers": routers, "load_age_ms": 50},
    )
    result = simulate(of).result
    assert result.both_met > 0.95
    assert result.tpot.p50 < 0.1


@pytest.mark.usefixtures("no_queue")
def test_routers_that_know_each_others_requests_late_make_prompts_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One router, and four with reports that are at most 0.1 s and 2 s old. They tell each other
    what they have sent, or do not."""

    def ttft_s(routers: int, load_age_ms: float) -> float:
        many = {"routers": routers, "load_age_ms": load_age_ms, "admission_ttft_ms": 1e9}
        of = scenario(
            mix(8, prompt="uniform:100-1500", output=20),
            seconds=200,
            pools={"prefill": 8, "decode": 4},
            routing=many,
        )
        return simulate(of).result.ttft.mean

    alone_s = ttft_s(1, 0)
    assert ttft_s(4, 100) < 1.25 * alone_s
    assert ttft_s(4, 2000) < 1.25 * alone_s
    monkeypatch.setattr(WorkLedger, "announce", lambda *_: None)
    assert ttft_s(4, 100) < 1.25 * alone_s
    assert ttft_s(4, 2000) > 1.3 * alone_s


def test_siblings_that_come_to_other_routers_go_where_their_prefix_is_computed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of four requests with a cold prefix of 5 s, 0.1 s apart, three find it. Reports are old."""
    trace = tmp_path / "siblings.jsonl"
    trace.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": 4000 * group + 100 * sibling,
                    "input_length": 5130,
                    "output_length": 5,
                    "hash_ids": [*range(10 * group, 10 * group + 10), 1000 + 4 * group + sibling],
                }
            )
            + "\n"
            for group in range(20)
            for sibling in range(4)
        )
    )

    def cached(routers: int, load_age_ms: float) -> float:
        many = {"routers": routers, "load_age_ms": load_age_ms, "admission_ttft_ms": 1e9}
        raw = {"machines": {"prefill": MACHINE}, "pools": {"prefill": 4, "decode": 4}}
        of = parse_scenario({**raw, "traffic": {"trace": str(trace)}, "routing": many})
        return simulate(of).result.cached_share

    assert cached(4, 1000) == pytest.approx(cached(1, 0)) and cached(1, 0) > 0.7
    monkeypatch.setattr(ExpectedPrefixes, "add_of_other", lambda *_: None)
    assert cached(4, 1000) < 0.3
