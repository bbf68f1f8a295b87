"""Needs by hand."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from cluster.sizing.demand import (
    NO_CORRECTIONS,
    backlog_requests,
    decode_batch_limits,
    decode_demand,
    demand_by_role,
    prefill_demand,
)
from cluster.sizing.predict import predict_latency, relative_speed
from cluster.sizing.queueing import prefill_service, resident_sequences, sizing_rate
from cluster.sizing.snapshot import Corrections, MachineModel, RequestSample, RoleValues
from protocol.roles import Role
from tests.cluster.sizing.worlds import GOALS, MACHINE, mix

NONE = NO_CORRECTIONS


def test_service_of_two_kinds() -> None:
    load = mix(1.0, samples=(RequestSample(512, 0, 10, 3.0), RequestSample(1024, 0, 10, 1.0)))
    of = prefill_service(load, MACHINE)
    short, long = 0.01 + 0.0512, 0.02 + 0.1024
    assert of.mean_s == pytest.approx((3 * short + long) / 4)
    assert of.q90_s == pytest.approx(long)
    variance = (3 * (short - of.mean_s) ** 2 + (long - of.mean_s) ** 2) / 4
    assert of.spread == pytest.approx(variance / of.mean_s**2)


def test_residents_are_counted_as_long_as_they_stay() -> None:
    load = mix(1.0, samples=(RequestSample(100, 0, 10), RequestSample(1000, 0, 30)))
    assert resident_sequences(load, MACHINE).output == pytest.approx(20)
    assert resident_sequences(load, MACHINE).kv_tokens == pytest.approx((10 * 105 + 30 * 1015) / 40)


def test_decode_by_the_objective() -> None:
    need = decode_demand(mix(4.0), MACHINE, GOALS, NONE)
    held = 1000 + 100
    together = math.floor((0.05 - 0.01) / (0.0001 + 1e-8 * held))
    together = min(together, 64, 100_000 // held)
    step = 0.01 + together * (0.0001 + 1e-8 * held)
    load = 4.0 * 200 * step
    assert need.each == together
    assert need.load == pytest.approx(load)
    assert need.workers == math.ceil((load + 2 * math.sqrt(load)) / together)


def test_what_allows_no_more() -> None:
    small = replace(MACHINE, kv_tokens=5000)
    assert decode_batch_limits(mix(1.0), small, GOALS).by_kv == 4
    assert decode_batch_limits(mix(1.0), replace(MACHINE, max_batch=3), GOALS).size == 3
    pace = decode_batch_limits(mix(1.0, pace=2.0), replace(MACHINE, max_batch=999), GOALS).by_tpot
    assert pace > 2 * decode_batch_limits(mix(1.0), replace(MACHINE, max_batch=999), GOALS).by_tpot


def test_kv_in_transit_takes_room() -> None:
    slow = replace(MACHINE, link_bytes_s=1e8)
    assert (
        decode_batch_limits(mix(1.0), slow, GOALS).by_kv
        < decode_batch_limits(mix(1.0), MACHINE, GOALS).by_kv
    )


def test_twice_the_load_needs_less_than_twice_the_workers() -> None:
    tight = replace(GOALS, ttft_s=0.14)
    one, two = (prefill_demand(mix(rate), MACHINE, tight, 1.0) for rate in (40.0, 80.0))
    assert two.load == pytest.approx(2 * one.load)
    assert one.workers < two.workers < 2 * one.workers


def test_an_objective_below_a_prompt_alone() -> None:
    need = prefill_demand(mix(10.0, uncached=20_000), MACHINE, GOALS, 1.0)
    assert need.infeasible
    assert need.workers == math.ceil(need.load / 0.8)
    need = decode_demand(mix(1.0), replace(MACHINE, step=(0.06, 0, 0, 1e-4, 0)), GOALS, NONE)
    assert need.infeasible


def test_a_backlog_is_work() -> None:
    """Beyond what is under way, and what may queue within the patience of those who wait."""
    both: dict[Role, MachineModel] = {"prefill": MACHINE, "decode": MACHINE}
    calm = demand_by_role(mix(10.0), both, GOALS, NONE)["prefill"]
    late = demand_by_role(mix(10.0, backlog_tokens=300_000), both, GOALS, NONE)["prefill"]
    under_way = calm.load / 2  # all prompts take the same time
    bearable = 0.15 * (GOALS.ttft_s - calm.each) * calm.workers / calm.each
    excess = 300 - under_way - bearable
    assert late.load == pytest.approx(calm.load + excess / 30 * calm.each)
    usual = mix(10.0, backlog_tokens=1000 * (under_way + bearable))
    assert demand_by_role(usual, both, GOALS, NONE)["prefill"] == calm


def test_who_waits_for_a_prompt_will_decode_too() -> None:
    both: dict[Role, MachineModel] = {"prefill": MACHINE, "decode": MACHINE}
    calm, late = (
        demand_by_role(mix(10.0, backlog_tokens=tokens), both, GOALS, NONE)
        for tokens in (0, 300_000)
    )
    assert late["decode"].load > calm["decode"].load


def test_who_waits_is_no_more_sequences_than_they_are() -> None:
    """Long answers outlast the time in which a backlog is worked off."""
    long = mix(1.0, output=20_000)
    calm, late = (decode_demand(long, MACHINE, GOALS, NONE, queued).load for queued in (0.0, 100.0))
    assert late == pytest.approx(calm + 100.0)
    short = mix(1.0, output=20)
    calm, late = (
        decode_demand(short, MACHINE, GOALS, NONE, queued).load for queued in (0.0, 100.0)
    )
    assert calm < late < calm + 10.0


def test_those_who_decode_have_room() -> None:
    few = decode_demand(mix(1.0), MACHINE, GOALS, NONE)
    many = decode_demand(mix(1.0, residents=10 * few.each), MACHINE, GOALS, NONE)
    assert (few.workers, many.workers) == (1, 10)


def test_a_backlog_is_of_whole_prompts() -> None:
    """Workers count what waits before anybody has looked into their caches."""
    load = replace(mix(10.0), samples=(RequestSample(250.0, 750.0, 200.0),))
    cached = backlog_requests(replace(load, backlog_tokens=300_000), MACHINE, GOALS, 1.0)
    assert 270 < cached < 300


def test_the_network_floors_both() -> None:
    thin = replace(MACHINE, link_bytes_s=1e8)
    found = demand_by_role(mix(20.0), {"prefill": thin, "decode": thin}, GOALS, NONE)
    floor = math.ceil(20 * 1000 * 1e5 / (0.8 * 1e8))
    assert {need.link_floor for need in found.values()} == {floor}
    assert found["prefill"].workers == found["decode"].workers == floor


def test_a_burst_is_more_than_chance() -> None:
    assert sizing_rate(mix(10.0, burst_rate=11.0, burst_s=15.0)) == 10.0
    assert sizing_rate(mix(10.0, burst_rate=40.0, burst_s=15.0)) == pytest.approx(
        40 - 2.5 * math.sqrt(40 / 15)
    )


def test_a_burst_that_patience_outlasts_needs_nobody() -> None:
    burst = mix(10.0, burst_rate=40.0, burst_s=15.0)
    assert sizing_rate(burst, 14.0) > 30.0
    assert sizing_rate(burst, 15.0) == 10.0


def test_who_holds_less_kv_than_lengths_say_needs_less_room() -> None:
    """Long prompts with short answers: few of them are there at a time."""
    less, wide = replace(NONE, kv=0.5), replace(MACHINE, max_batch=999)
    twice = 2 * decode_batch_limits(mix(1.0), wide, GOALS).by_kv
    assert decode_batch_limits(mix(1.0), wide, GOALS, less).by_kv == pytest.approx(twice, abs=1)
    few, many = (decode_demand(mix(50.0), wide, GOALS, kv).workers for kv in (less, NONE))
    assert few < many


def test_nobody_asks() -> None:
    found = demand_by_role(mix(0.0, samples=()), {"decode": MACHINE}, GOALS, NONE)
    assert [need.workers for need in found.values()] == [0, 0]


def test_corrections_make_work_heavier() -> None:
    load, machines = mix(30.0), {"prefill": MACHINE, "decode": MACHINE}
    plain = demand_by_role(load, machines, GOALS, NONE)  # type: ignore[arg-type]
    twice = demand_by_role(load, machines, GOALS, Corrections(prefill=2.0, decode=2.0))  # type: ignore[arg-type]
    assert twice["prefill"].load == pytest.approx(2 * plain["prefill"].load)
    assert twice["decode"].workers > plain["decode"].workers


def test_predictions() -> None:
    machines = {"prefill": MACHINE, "decode": MACHINE}
    idle = predict_latency(mix(0.01), machines, RoleValues(prefill=1, decode=1), NONE)  # type: ignore[arg-type]
    assert idle.ttft_s == pytest.approx(0.01 + 0.12, rel=0.01)
    assert idle.tpot_s == pytest.approx(0.01 + 0.0001 + 1e-8 * 1100, rel=0.01)
    flooded = predict_latency(mix(99.0), machines, RoleValues(prefill=1, decode=1), NONE)  # type: ignore[arg-type]
    assert flooded.ttft_s is None and flooded.tpot_s is None
    none = predict_latency(mix(0.0, samples=()), machines, RoleValues(prefill=1, decode=1), NONE)  # type: ignore[arg-type]
    assert none.ttft_s is None


def test_a_lent_worker_is_worth_what_it_computes() -> None:
    slow = replace(MACHINE, step=(0.02, 0.0002, 2e-8, 2e-4, 0.0))
    machines = {"prefill": MACHINE, "decode": slow}
    assert relative_speed("prefill", "decode", mix(1.0), machines, GOALS) == pytest.approx(0.5)  # type: ignore[arg-type]
    assert relative_speed("decode", "decode", mix(1.0), machines, GOALS) == 1.0  # type: ignore[arg-type]
    assert relative_speed("decode", "prefill", mix(1.0), machines, GOALS) > 1.0  # type: ignore[arg-type]
