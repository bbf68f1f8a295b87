"""Every request ends once, whatever happens to workers; nothing is left behind."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from bench.lib.routing_policies import POLICIES, least_loaded
from cluster.simulator.devices.cache import CACHE_BLOCK_TOKENS
from cluster.simulator.devices.request import SimulatedRequest
from cluster.simulator.result import pool_rows
from cluster.simulator.scenario import Scenario
from cluster.simulator.simulation import Simulation, SimulationRun, simulate
from cluster.simulator.traffic import scenario_requests
from cluster.sizing.decision import Loan, ScalingDecision
from cluster.sizing.snapshot import SizingSnapshot, WorkerCounts
from protocol.errors import StartupError
from protocol.roles import ROLES, Role
from tests.cluster.simulator.scenarios import NO_DEADLINE, mix, scenario

SCALING = {"mode": "act", "prefill_max": 8, "decode_max": 8, "start_s": 5, "down_after_s": 20,
           "down_every_s": 5, "warm_up_s": 5, "loan_drain_s": 1}  # fmt: skip
FAULTS = [
    {"kind": "die", "at_s": 10, "pool": "decode"},
    {"kind": "die", "at_s": 20, "pool": "prefill"},
    {"kind": "slow_link", "at_s": 15, "for_s": 20, "pool": "prefill", "share": 0.05, "count": 3},
    {"kind": "slow_start", "at_s": 5, "for_s": 20, "start_s": 15},
    {"kind": "no_start", "at_s": 40, "for_s": 10},
    {"kind": "blind", "at_s": 30, "for_s": 10},
    {"kind": "burst", "at_s": 45, "for_s": 5, "times": 4},
]


def wild(**rest: Any) -> Scenario:
    """Prompts, then answers, with prefixes, faults and an autoscaler, in pools that are tight."""
    return scenario(
        mix(12, "lognormal:300,0.8,3000", "lognormal:20,0.7,200", for_s=30),
        mix(8, "lognormal:700,0.3,2000", "lognormal:90,0.7,900", from_s=30, prefix=1024, groups=3),
        seconds=70,
        machine={
            "step": [0.01, 0.0, 0.0, 5e-4, 0.0],
            "kv_tokens": 12_000,
            "max_batch": 12,
            "link_gb_per_s": 0.02,
            "kv_bytes": 1e4,
        },
        pools={"prefill": 3, "decode": 3},
        drain_s=0,
        autoscaler=SCALING,
        events=FAULTS,
        **rest,
    )


def restless(snapshot: SizingSnapshot) -> ScalingDecision:
    """Lends, starts and stops as chance has it."""
    draw = Random(snapshot.at_s)
    steady = [w for w in snapshot.workers if w.state == "serving"]
    worker = draw.choice(steady) if steady else None
    role: Role = "prefill" if worker is None or worker.role == "decode" else "decode"
    loans = (Loan(instance=worker.instance, role=role),) if worker else ()
    targets = WorkerCounts(prefill=draw.randint(1, 5), decode=draw.randint(1, 5))
    return ScalingDecision(
        wanted=targets,
        targets=targets,
        reason="steady",
        text="",
        memory=snapshot.memory,
        loans=loans,
    )


@pytest.fixture(scope="module")
def run() -> SimulationRun:
    return simulate(wild(), restless, keep_records=True)


def test_every_request_ends_once(run: SimulationRun) -> None:
    states = Counter(job.status for job in run.requests)
    assert run.result.requests == len(run.requests) == sum(states.values()) > 600
    assert set(states) <= {"ok", "refused", "failed"}
    assert states["ok"] > 0.5 * len(run.requests)
    assert run.result.moved > 0 and run.result.loans > 0  # or little happened in this test


def test_times_are_in_order(run: SimulationRun) -> None:
    for job in run.requests:
        if job.status == "ok":
            assert job.first_s is not None and job.done_s is not None
            assert job.at < job.first_s <= job.done_s + 0.004


@pytest.mark.parametrize("routing", [{}, {"routers": 3, "load_age_ms": 500}])
def test_nothing_is_left_behind(routing: dict[str, Any]) -> None:
    of = wild(routing=routing)
    world = Simulation(of, restless)
    requests = scenario_requests(of)
    world.run(requests)
    assert len(world.lifecycle.ended) == len(requests) == len(set(world.lifecycle.ended))
    for worker in world.fleet.workers:
        assert worker.claimed_tokens == worker.uncomputed_prompts == worker.uncomputed_tokens == 0
        assert not worker.requests
        assert worker.batch.rows == 0
    for router in world.routers:
        assert router.ledger.prompts == 0
        assert not router.ledger.pending_kv and not router.ledger.active
        assert not any(router.in_decode.values())
    network = world.network
    assert not any((*network._in.values(), *network._out.values()))


def test_the_same_seed_gives_the_same_and_another_another(run: SimulationRun) -> None:
    again = simulate(wild(), restless, keep_records=True)
    assert [j.done_s for j in again.requests] == [j.done_s for j in run.requests]
    assert [r.decision for r in again.records] == [r.decision for r in run.records]
    other = simulate(wild().model_copy(update={"seed": 1}), restless)
    assert [j.at for j in other.requests] != [j.at for j in run.requests]


def test_gpu_hours_end_with_the_arrivals_whoever_scales() -> None:
    of: dict[str, Any] = {"seconds": 100, "pools": {"prefill": 2, "decode": 3}}
    fixed = simulate(scenario(mix(1, 100, 3000), **of))
    assert max(job.done_s or 0.0 for job in fixed.requests) > 100
    assert fixed.result.gpu_hours == pytest.approx(5 * 100 / 3600)
    keeps = {"mode": "act", "prefill_min": 2, "prefill_max": 2, "decode_min": 3, "decode_max": 3}
    scaled = simulate(scenario(mix(1, 100, 3000), autoscaler=keeps, **of))
    assert scaled.result.gpu_hours == fixed.result.gpu_hours


def test_goodput_per_gpu_is_that_of_the_time_after_the_warm_up() -> None:
    """Requests come in the second half alone."""
    of: dict[str, Any] = {"seconds": 100, "pools": {"prefill": 1, "decode": 1}}
    load = mix(5, arrivals="constant", from_s=50)
    whole = simulate(scenario(load, **of)).result
    warm = simulate(scenario(load, warm_up_s=50, **of)).result
    assert whole.gpu_hours == pytest.approx(2 * 100 / 3600)
    assert warm.gpu_hours == pytest.approx(2 * 50 / 3600)
    assert dict(pool_rows(warm))["goodput per GPU"] == "2.5 requests/s"
    assert warm.busy_decode == pytest.approx(2 * whole.busy_decode, rel=0.1)


def test_what_happens_during_the_warm_up_is_not_counted(run: SimulationRun) -> None:
    late = simulate(wild(warm_up_s=40), restless, keep_records=True)
    assert [r.decision for r in late.records] == [r.decision for r in run.records]
    decided = [r for r in late.records if r.snapshot.at_s >= 40]
    assert late.result.reasons == {"steady": len(decided)}
    assert 0 < late.result.loans < run.result.loans
    assert 0 < late.result.moved < run.result.moved


def test_workers_of_several_gpus_cost_as_many_and_share_a_budget_of_gpus() -> None:
    of: dict[str, Any] = {"seconds": 300, "pools": {"prefill": 1, "decode": 1}}
    acts = {"mode": "act", "gpus": 8, "start_s": 1}
    ended = simulate(scenario(mix(12, 300, 100), machine={"tp": 2}, autoscaler=acts, **of))
    most = max(m.prefill + m.decode + m.starting for m in ended.result.moments)
    assert most == 4
    assert 2 * 2 * 300 / 3600 < ended.result.gpu_hours <= 2 * 4 * 300 / 3600
    with pytest.raises(StartupError, match="gpus: 3, but pools begin with 4"):
        simulate(scenario(mix(1), machine={"tp": 2}, autoscaler={**acts, "gpus": 3}))


def test_workers_cost_and_go_when_nobody_asks_any_more() -> None:
    pools = {"prefill": 3, "decode": 3}
    fixed = simulate(scenario(mix(5, for_s=60), seconds=600, pools=pools)).result
    assert fixed.gpu_hours == pytest.approx(6 * 600 / 3600)
    assert fixed.seconds == 600
    acts = {"mode": "act"}
    scaled = simulate(scenario(mix(5, for_s=60), seconds=600, pools=pools, autoscaler=acts)).result
    assert scaled.moments[-1].prefill == scaled.moments[-1].decode == 1
    assert scaled.gpu_hours < 0.8 * fixed.gpu_hours


def test_a_death_costs_time_and_no_request() -> None:
    busy = mix(4, 100, 400)
    calm = simulate(scenario(busy, seconds=30, pools={"prefill": 2, "decode": 2})).result
    events = [{"kind": "die", "at_s": 15, "pool": "decode"}]
    struck = simulate(
        scenario(busy, seconds=30, pools={"prefill": 2, "decode": 2}, events=events)
    ).result
    assert struck.ok == calm.ok == struck.requests
    assert struck.tpot.p99 > calm.tpot.p99
    assert struck.gpu_hours < calm.gpu_hours


def test_who_keeps_the_numbers_starts_another_for_one_that_died() -> None:
    events = [{"kind": "die", "at_s": 5, "pool": "decode"}]
    scaler = {"mode": "act", "start_s": 7, "loans": False}
    of = scenario(mix(5), seconds=60, events=events, autoscaler=scaler, **NO_DEADLINE)
    result = simulate(of).result
    there = {moment.at_s: moment.decode for moment in result.moments}
    assert {n for at, n in there.items() if 6 < at < 11} == {0}
    assert {n for at, n in there.items() if at > 13} == {1}
    assert result.ok + result.refused == result.requests


def test_a_start_that_fails_is_tried_again() -> None:
    events = [{"kind": "no_start", "at_s": 1, "for_s": 20}]
    of = scenario(mix(5), seconds=60, events=events, autoscaler={"start_s": 7})
    world = Simulation(of)
    world.clock.at(5.0, lambda: world.fleet.start("decode"))
    world.run(scenario_requests(of))
    (came,) = [w for w in world.fleet.workers if w.asked_s == 5.0]
    assert came.since_s == 25.0 + 7.0  # asked at 5 and 15, in vain


def test_the_third_death_under_a_request_ends_it() -> None:
    of = scenario(mix(0.01, 100, 900), seconds=1, pools={"prefill": 0, "decode": 4})
    world = Simulation(of)
    requests = scenario_requests(of)
    for at in (1.0, 2.0, 3.0):
        world.clock.at(at, lambda: world.fleet.die(requests[0].decode or world.fleet.workers[0]))
    world.run(requests)
    assert requests[0].status == "failed" and requests[0].deaths == 3


def test_without_a_decode_worker_new_requests_are_refused_at_once() -> None:
    events = [{"kind": "die", "at_s": 5, "pool": "decode"}]
    scaler = {"mode": "act", "start_s": 7, "loans": False}
    run = simulate(scenario(mix(5), seconds=30, events=events, autoscaler=scaler, **NO_DEADLINE))
    late = [r for r in run.requests if 5 < r.at < 12]
    assert len(late) > 20 and {r.status for r in late} == {"refused"}
    assert {r.status for r in run.requests if not 5 < r.at < 12} == {"ok"}
    assert {r.attempt for r in run.requests if r.at < 5} == {1, 2}  # a few waited for the start


def test_an_interrupted_request_waits_for_a_decode_worker_until_its_first_deadline() -> None:
    """Other changes of the workers neither try the request again nor let it wait for longer."""
    of = scenario(mix(1), seconds=30, autoscaler={"start_s": 1}, **NO_DEADLINE)
    world = Simulation(of)
    request, ended = SimulatedRequest(0, 1.0, 100, 900), []
    world.clock.at(2.0, lambda: world.fleet.die(world.fleet.workers[1]))
    for at in (5.0, 9.0, 11.0):
        world.clock.at(at, lambda: world.fleet.start("prefill"))
    for at in (12.2, 12.3):  # 10 s after the notice of the death
        world.clock.at(at, lambda: ended.append(request.status))
    world.run([request])
    assert ended == ["", "failed"] and request.attempt == 2


def test_a_request_that_no_pool_holds_is_refused_at_once() -> None:
    of = scenario(mix(1, 900, 200), seconds=5, machine={"kv_tokens": 1000})
    result = simulate(of).result
    assert result.too_long == result.requests > 0


def test_who_would_come_too_late_is_refused() -> None:
    of = scenario(mix(30), seconds=30, routing={"admission_ttft_ms": 500})
    result = simulate(of).result
    assert result.refused > 0
    assert result.ttft.p99 < 0.7


def test_a_slow_link_shows_in_the_time_per_token_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.simulator.devices.routing.choose_placement", least_loaded)
    machine = {"link_gb_per_s": 0.001}
    quick = simulate(scenario(mix(1), seconds=20)).result
    slow = simulate(scenario(mix(1), seconds=20, machine=machine)).result
    assert slow.ttft.p50 == pytest.approx(quick.ttft.p50)
    assert slow.tpot.p50 > 1.2 * quick.tpot.p50


@pytest.mark.parametrize("policy", POLICIES)
def test_all_routing_policies_serve_everybody(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.simulator.devices.routing.choose_placement", POLICIES[policy])
    of = scenario(
        mix(4, prefix=1024, groups=2, prompt=1200),
        seconds=20,
        machine={"step": [0.01, 0.0, 0.0, 1e-4, 0.0]},
        pools={"prefill": 12, "decode": 12},
    )
    result = simulate(of).result
    assert result.ok == result.requests
    assert result.cached_share > 0.3


@pytest.mark.parametrize("kv_tokens", [1_000_000, 6_000])
def test_many_workers_are_chosen_from_as_if_all_were_shown(
    kv_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preselected workers give the policy's choice among all, also where KV is scarce. Nobody
    fetches a prefix: the peer that it comes from may be another one."""
    monkeypatch.setattr("router.placement.cost.find_fetch", lambda *_: None)
    of = scenario(
        mix(20, prefix=1024, groups=4, prompt="uniform:600-4000", output=100),
        seconds=20,
        machine={
            "step": [0.01, 0.001, 1e-6, 1e-4, 0.0],
            "link_gb_per_s": 0.001,
            "kv_tokens": kv_tokens,
        },
        pools={"prefill": 30, "decode": 30},
    )
    narrow = simulate(of)
    world = Simulation(of)
    monkeypatch.setattr(
        "cluster.simulator.devices.routing.preselect_workers", lambda places, *_: places
    )
    requests = scenario_requests(of)
    world.run(requests)
    assert [j.done_s for j in requests] == [j.done_s for j in narrow.requests]
    assert {role: world.fleet.count(role) for role in ROLES} == {"prefill": 30, "decode": 30}


def test_pages_of_a_long_prompt_are_reserved_when_its_kv_is_about_to_flow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """20 chunks of 1.01 s; the KV of the whole prompt takes 2 s over the link, a chunk's 0.1 s."""
    monkeypatch.setattr("cluster.simulator.devices.routing.choose_placement", least_loaded)
    of = scenario(
        mix(0.9, 20_000, 50),
        seconds=3,
        machine={"chunk": 1000, "link_gb_per_s": 0.01},
        objectives={"ttft_ms": 30_000, "tpot_ms": 100},
    )
    world = Simulation(of)
    (request,) = requests = scenario_requests(of)[:1]
    world.run(requests)
    assert request.reserved_s is not None and request.computed_s is not None
    assert 2.0 < request.computed_s - request.reserved_s < 3.0
    assert request.done_s == pytest.approx(20.2 + 0.1 + 49 * 0.01, abs=0.01)  # nothing is later


def test_short_prompts_do_not_wait_for_the_pages_of_long_ones_that_are_computed() -> None:
    """Five long prompts fit the pool, and twelve are computed at a time."""
    of = scenario(
        mix(1.2, 10_000, 100),
        mix(4, 200, 20),
        seconds=60,
        machine={"chunk": 500, "kv_tokens": 60_000, "link_gb_per_s": 1.0},
        pools={"prefill": 24, "decode": 1},
        objectives={"ttft_ms": 30_000, "tpot_ms": 100},
        **NO_DEADLINE,
    )
    result = simulate(of).result
    assert result.ok == result.requests > 300
    assert result.tpot.p99 < 0.02  # reserved at the start of each prefill, 0.4 s


def test_a_half_computed_prompt_hides_no_work_of_other_routers() -> None:
    """Two routers send one prompt each to the only prefill worker, 1 s for each 1000 tokens."""
    of = scenario(
        mix(1), seconds=60, machine={"chunk": 1000}, pools={"prefill": 1, "decode": 1},
        routing={"routers": 2, "load_age_ms": 100, "admission_ttft_ms": 1e9},
    )  # fmt: skip
    world = Simulation(of)
    worker = next(w for w in world.fleet.workers if w.role == "prefill")
    queues = [router.ledger.queue(worker.name) for router in world.routers]
    requests = [SimulatedRequest(0, 0.0, 10_000, 10), SimulatedRequest(1, 0.0, 4000, 10)]
    for request, router in zip(requests, world.routers, strict=True):
        chosen = router.route(request)
        assert chosen is not None
        request.router = router
        world.lifecycle._enter(request, chosen.placement._replace(prefill=worker.name))
    world.clock.run_before(5.2)
    assert worker.reported_prompts == (9000, 2, 5000, None)
    assert [queue.tokens for queue in queues] == [10_000, 4000]
    assert [queue.others for queue in queues] == [4000 * 9 // 14, 10_000 * 9 // 14]


def test_a_prompt_that_waits_is_no_work_of_other_routers_where_it_is_cached() -> None:
    """The second of two siblings waits for the first one's prefix."""
    of = scenario(
        mix(1), seconds=60, machine={"chunk": 1000}, pools={"prefill": 0, "decode": 1},
        routing={"load_age_ms": 100, "admission_ttft_ms": 1e9},
    )  # fmt: skip
    world = Simulation(of)
    [router] = world.routers
    blocks = tuple(number.to_bytes(16) for number in range(10_000 // CACHE_BLOCK_TOKENS))
    for request in (SimulatedRequest(n, 0.0, 10_000, 10, blocks) for n in range(2)):
        chosen = router.route(request)
        assert chosen is not None
        request.router = router
        world.lifecycle._enter(request, chosen.placement)
    world.clock.run_before(5.2)
    assert chosen is not None
    queue = router.ledger.queue(chosen.placement.p.instance)
    assert queue.requests == 2 and queue.tokens < 11_000
    assert (queue.others, queue.other_prompts) == (0, 0)
