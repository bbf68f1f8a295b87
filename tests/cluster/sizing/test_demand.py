"""Demand computed by hand."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time

import numpy as np
import pytest
from msgspec.structs import replace

from cluster.sizing.decision import RoleDemand
from cluster.sizing.demand import demand_by_role, load_error, queued_work_s
from cluster.sizing.predict import predict_latency, relative_speed
from cluster.sizing.queueing import LARGEST_LOAD, PrefillOutlook, late_share, prefill_service
from cluster.sizing.residency import decode_batch_limits, early_seconds, resident_sequences
from cluster.sizing.snapshot import (
    NO_CORRECTIONS,
    Arrivals,
    Corrections,
    MachineModel,
    RequestMix,
    RequestSample,
    RoleValues,
    SloTargets,
)
from protocol.performance.speculation_profile import SpeculationProfile
from protocol.performance.step_model import StepModel
from protocol.roles import Role
from tests.cluster.sizing.worlds import GOALS, MACHINE, mix

BOTH: dict[Role, MachineModel] = {"prefill": MACHINE, "decode": MACHINE}
ONE_EACH = RoleValues(prefill=1, decode=1)
DRAFTS = SpeculationProfile(accept=(0.8, 0.8, 0.8), per_pass_s=5e-4, row_s=1e-4, most_nodes=128)


def demand(
    load: RequestMix,
    machine: MachineModel = MACHINE,
    goals: SloTargets = GOALS,
    corrections: Corrections = NO_CORRECTIONS,
    start_s: float = math.inf,
) -> tuple[RoleDemand, RoleDemand]:
    machines: dict[Role, MachineModel] = {"prefill": machine, "decode": machine}
    found = demand_by_role(load, machines, goals, corrections, start_s)
    return found["prefill"], found["decode"]


def test_service_of_two_kinds() -> None:
    load = mix(1.0, samples=(RequestSample(512, 0, 10, 3.0), RequestSample(1024, 0, 10, 1.0)))
    of = prefill_service(load, MACHINE)
    assert of.seconds.tolist() == pytest.approx([0.01 + 0.0512, 0.02 + 0.1024])
    assert of.weights.tolist() == [0.75, 0.25]
    twice = prefill_service(load, MACHINE, 2.0)
    assert [twice.mean_s, twice.spread] == pytest.approx([2 * of.mean_s, of.spread])


# ---- prefill ------------------------------------------------------------------------------------


def test_each_prompt_has_its_own_slack() -> None:
    """A tenth of the prompts may be late by their wait: here those that take long."""
    samples = (RequestSample(1000, 0, 10, 9.0), RequestSample(8000, 0, 10, 1.0))
    load = mix(20.0, samples=samples, window_s=0.0)
    goals = replace(GOALS, ttft_s=1.2)
    need, service = demand(load, goals=goals)[0], prefill_service(load, MACHINE)
    outlook = PrefillOutlook(need.load)
    assert late_share(need.workers, outlook, service, 1.2) <= 0.1
    assert late_share(need.workers - 1, outlook, service, 1.2) > 0.1
    assert need.workers == demand(load, goals=replace(GOALS, ttft_s=1.1))[0].workers


def test_twice_the_load_needs_less_than_twice_the_workers() -> None:
    tight = replace(GOALS, ttft_s=0.14)
    one, two = (demand(mix(rate), goals=tight)[0] for rate in (40.0, 80.0))
    assert two.load == pytest.approx(2 * one.load)
    assert one.workers < two.workers < 2 * one.workers


def test_demand_has_no_jump_where_prompts_alone_pass_the_objective() -> None:
    """A prompt takes 0.12 s. Tight objectives need many workers; impossible ones do not."""
    found = [
        demand(mix(100.0), goals=replace(GOALS, ttft_s=0.12 + slack / 1000))[0]
        for slack in range(-60, 61)
    ]
    counts = [need.workers for need in found]
    assert max(abs(b - a) for a, b in itertools.pairwise(counts)) <= 1
    assert max(counts) == max(counts[59:62]) > counts[-1] and max(counts) > counts[0]
    assert [need.infeasible for need in found] == [slack <= 0 for slack in range(-60, 61)]


def test_growth_while_workers_start_is_spared_for() -> None:
    def workers(growth: float, start_s: float) -> int:
        return demand(mix(100.0, growth_samples=(growth,)), start_s=start_s)[0].workers

    assert workers(0.0, 60.0) == workers(0.0, math.inf) == 13  # 12 erlangs
    assert 12 * 1.25 < workers(0.5, 60.0) < 12 * 1.5  # patience takes a part of it
    assert workers(0.5, 2.0) == 12
    assert workers(0.5, math.inf) == 18  # pools that stay as they are


def test_room_for_a_growth_follows_from_how_often_it_comes() -> None:
    """A load of 12 erlangs that doubles once in 30 minutes makes few prompts late in all; one that
    doubles in every third needs room for it."""

    def workers(*growth: float) -> int:
        return demand(mix(100.0, growth_samples=growth), start_s=60.0)[0].workers

    calm = workers(0.0)
    assert workers(*(0.0,) * 29, 1.0) == calm
    often = workers(0.0, 0.0, 1.0)
    assert calm + 3 < often <= workers(1.0)


def test_long_prompts_that_are_computed_are_no_queue() -> None:
    """1.2 prompts of 1,000 tokens are computed on average, half of each is done."""
    load = mix(10.0)
    service = prefill_service(load, MACHINE)
    most = 1000 * (0.6 + 2 * math.sqrt(0.4))
    assert queued_work_s(replace(load, backlog_tokens=most - 1), service) == 0.0
    assert queued_work_s(replace(load, backlog_tokens=most + 1000), service) == pytest.approx(0.12)


def test_a_queue_is_work() -> None:
    """Without what is computed. Patience bears a short queue; a long one is worked off while a
    worker starts."""
    load = mix(10.0)
    service = prefill_service(load, MACHINE)
    computed = 1000 * (0.6 + 2 * math.sqrt(0.4))  # of 1.2 prompts, and of chance
    queue = replace(load, backlog_tokens=300_000 + computed)
    assert queued_work_s(replace(load, backlog_tokens=computed), service) == 0.0
    assert queued_work_s(queue, service) == pytest.approx(300 * 0.12)
    calm, late = demand(load, start_s=60.0), demand(queue, start_s=60.0)
    assert (calm[0].workers, late[0].workers) == (2, 2)  # 0.8 * 60 s are spare
    longer = replace(load, backlog_tokens=1e6)  # 120 s of work in 60 s
    assert demand(longer, start_s=60.0)[0].workers == 4
    assert demand(longer, start_s=600.0)[0].workers == 2
    assert late[1].load == calm[1].load, "its requests have arrived"


def test_a_backlog_is_of_whole_prompts() -> None:
    """Workers count what waits before anybody has looked into their caches."""
    load = replace(mix(10.0), samples=(RequestSample(250.0, 750.0, 200.0),))
    service = prefill_service(load, MACHINE)
    queued = queued_work_s(replace(load, backlog_tokens=300_000), service) / service.mean_s
    assert 299 < queued < 300


# ---- decode -------------------------------------------------------------------------------------


def test_residents_are_counted_as_long_as_they_stay() -> None:
    load = mix(1.0, samples=(RequestSample(100, 0, 10), RequestSample(1000, 0, 30)))
    found = resident_sequences(load, MACHINE)
    assert found.output == pytest.approx(20)
    assert found.kv_tokens == pytest.approx((10 * 105 + 30 * 1015) / 40)


def test_decode_by_the_objective() -> None:
    """The largest batch within TPOT, and room for two deviations above the mean."""
    fast = replace(MACHINE, kv_tokens=0, max_batch=999)
    need = demand(mix(16.0), fast)[1]
    row_s = 0.0001 + 1e-8 * 1100
    assert need.each == pytest.approx((0.05 - 0.01) / row_s, rel=1e-3)
    rate = 16.0 * 200 / need.workers  # tokens/s of each worker
    assert need.load == pytest.approx(need.workers * rate * 0.01 / (1 - rate * row_s), rel=1e-3)
    assert need.load + 2 * math.sqrt(need.load) <= need.workers * need.each


def test_room_is_made_for_two_deviations() -> None:
    """A step of n sequences takes 10 + n/10 ms, so that n = 2*rate/(1 - rate/50) decode."""
    machine = replace(MACHINE, step=(0.01, 1e-4, 0, 1e-4, 0), kv_tokens=0, max_batch=300)
    two_kinds = (RequestSample(100, 0, 200, 3.0), RequestSample(4000, 0, 200))
    alike = [demand(mix(rate), machine)[1] for rate in (36.1, 36.6)]
    assert [need.workers for need in alike] == [1, 2]
    assert alike[0].load == pytest.approx(260, rel=0.01)  # and 272: more than 300 with 2 deviations
    assert demand(mix(36.1, samples=two_kinds), machine)[1].workers == 2


def test_each_limit_of_the_batch() -> None:
    def limits(machine: MachineModel, **corrected: float):  # type: ignore[no-untyped-def]
        corrections = replace(NO_CORRECTIONS, **corrected)
        return decode_batch_limits(resident_sequences(mix(1.0), machine, corrections), GOALS)

    wide = replace(MACHINE, max_batch=999)
    half = limits(replace(MACHINE, kv_tokens=5000)).by_kv  # half a sequence does not fit
    assert half == pytest.approx(5000 / 1100 - 0.5, rel=1e-3)
    assert limits(replace(MACHINE, max_batch=3)).size == 3
    assert limits(wide, kv=0.5).by_kv == pytest.approx(2 * limits(wide).by_kv + 0.5, rel=1e-3)
    assert limits(wide, decode=2.0).by_tpot < limits(wide).by_tpot / 2


def test_pools_are_not_filled_by_sequences_of_different_lengths() -> None:
    """A worker takes one sequence after another until the next one does not fit: what is then left
    of its pool is E[kv^2]/(2*E[kv]), if sequences are short beside it."""
    rng, kinds = random.Random(1), ((100.0, 3.0), (4000.0, 1.0))
    load = mix(1.0, samples=tuple(RequestSample(n, 0, 200, w) for n, w in kinds))
    held = [n + 100 for n, _ in kinds]  # with half of the answer
    fitted = []
    for _ in range(2000):
        left = float(MACHINE.kv_tokens)
        while (kv := rng.choices(held, [w for _, w in kinds])[0]) <= left:
            left -= kv
        fitted.append(MACHINE.kv_tokens - left)
    resident = resident_sequences(load, replace(MACHINE, max_batch=999))
    batch = decode_batch_limits(resident, GOALS).by_kv
    used = statistics.fmean(fitted) / resident.kv_tokens
    assert batch == pytest.approx(used, rel=0.005)
    assert batch < 0.99 * MACHINE.kv_tokens / resident.kv_tokens


@pytest.mark.parametrize(("prompt", "output"), [(200, 200), (100, 300)])
def test_workers_of_a_pool_differ_although_each_sequence_goes_where_most_is_free(
    prompt: int, output: int
) -> None:
    """Beside a simulation of decode steps; a sequence that ends is followed by a new one."""
    workers, batch, rng = 16, 100, np.random.default_rng(1)
    at = np.repeat(np.arange(workers), batch)
    held, left = (rng.exponential(n, len(at)) // 1 + 1 for n in (prompt, output))
    used, variances = np.bincount(at, weights=held), []
    for step in range(10 * output):
        held, left, used = held + 1, left - 1, used + np.bincount(at, minlength=workers)
        for row in np.flatnonzero(left <= 0):
            used[at[row]] -= held[row]
            held[row], left[row] = (rng.exponential(n) // 1 + 1 for n in (prompt, output))
            at[row] = used.argmin()
            used[at[row]] += held[row]
        if step > 2 * output:
            variances.append(used.var())
    lengths = zip(rng.exponential(prompt, 1000), rng.exponential(output, 1000), strict=True)
    load = mix(1.0, samples=tuple(RequestSample(p, 0, o, 1.0) for p, o in lengths))
    found = resident_sequences(load, MACHINE).imbalance
    assert found == pytest.approx(math.sqrt(statistics.fmean(variances)), rel=0.35)


def test_a_pool_has_room_for_what_one_worker_has_more_than_the_others() -> None:
    """At most for that of sequences which are spread by chance, as those without prompts are."""
    machine = replace(MACHINE, max_batch=999)
    for prompt, output, deviation in ((900, 100, 500 / 9), (0, 800, math.inf)):
        resident = resident_sequences(mix(1.0, prompt, output=output), machine)
        assert resident.imbalance == pytest.approx(deviation, rel=0.02)
        limits = decode_batch_limits(resident, GOALS)
        left = limits.size - limits.excess
        tokens = min(4 * deviation, 2 * resident.kv_tokens * math.sqrt(left))
        assert limits.excess == pytest.approx(tokens / resident.kv_tokens, rel=0.02)
        unlimited = resident._replace(machine=replace(machine, kv_tokens=0))
        assert decode_batch_limits(unlimited, GOALS).excess == 0


def test_the_share_that_a_decode_pool_leaves_free_does_not_vanish_in_large_pools() -> None:
    """Whether the sequences are still to come, or are there and hold all of their KV."""
    machine = replace(MACHINE, kv_tokens=30_000)
    load = mix(10.0, 500, output=500)
    limits = decode_batch_limits(resident_sequences(load, machine), GOALS)
    assert limits.size == limits.by_kv
    assert limits.size - limits.excess < 0.98 * limits.size

    def most(workers: int) -> float:
        return workers * (limits.size - limits.excess_beside(workers))

    for rate in (100.0, 1000.0, 10_000.0):
        _, coming = demand(replace(load, rate=rate), machine)
        assert coming.load <= most(coming.workers)
        there = replace(load, residents=rate * limits.size)
        _, found = demand(there, machine, start_s=0.001)
        assert there.residents <= most(found.workers)


def test_one_decode_worker_has_none_whose_kv_it_exceeds() -> None:
    """So it has room for chance only, and two have room for what one of them has more."""
    machine = replace(MACHINE, kv_tokens=30_000)
    resident = resident_sequences(mix(1.0, 500, output=500), machine)
    limits = decode_batch_limits(resident, GOALS)
    for workers in (1, 2):
        rates = [rate / 100 for rate in range(1, 1000)]
        found = [demand(mix(rate, 500, output=500), machine)[1] for rate in rates]
        n = max(d.load for d in found if d.workers == workers)
        room = 2.0 * math.sqrt(n * (1.0 + resident.spread))
        alike = workers * limits.excess / math.sqrt(2) if workers > 1 else 0.0
        assert n + math.hypot(room, alike) == pytest.approx(workers * limits.size, rel=0.01)


def test_drafts_size_the_batch_at_which_they_still_pay() -> None:
    """Their pace in a small batch, 2.9 tokens in a step, says nothing of a full one."""
    fast = replace(MACHINE, kv_tokens=0, max_batch=512)
    goals, load = replace(GOALS, tpot_s=0.03), mix(100.0)
    plain, drafting = (
        resident_sequences(load, replace(fast, speculation=p)) for p in (None, DRAFTS)
    )
    assert drafting.tpot_s(1.0) < plain.tpot_s(1.0) / 1.8
    assert plain.tpot_s(300.0) / 1.1 < drafting.tpot_s(300.0)
    sizes = [decode_batch_limits(r, goals).size for r in (plain, drafting)]
    assert sizes[0] <= sizes[1] < 1.2 * sizes[0]
    assert drafting.tpot_s(sizes[1]) == pytest.approx(0.03, rel=1e-3)


def test_kv_is_held_while_prompts_are_computed_and_sent() -> None:
    """Little's law with the whole time that a request holds pages."""
    linked = replace(MACHINE, link_bytes_s=1e9, max_batch=999, kv_tokens=50_000)
    load = mix(20.0, output=50)
    alone, held = (resident_sequences(load, linked, NO_CORRECTIONS, p) for p in (None, linked))
    early_s = 0.12 + 488 * 1e-4  # two chunks are reserved at the start; the second follows
    early_s += (512 - 488) * 1e-4
    assert held.early == pytest.approx(1000 * early_s, rel=1e-3)
    batch = decode_batch_limits(held, GOALS).by_kv
    seconds = 50 * held.tpot_s(batch)
    taken = batch * (1025 + 1000 * early_s / seconds)  # all but half a sequence
    assert taken == pytest.approx(50_000 - 1025 / 2, rel=1e-3)
    assert batch < 0.85 * decode_batch_limits(alone, GOALS).by_kv
    at_rate = predict_latency(load, {"prefill": linked, "decode": linked}, ONE_EACH)
    assert at_rate.kv_tokens is not None and at_rate.kv_tokens > 1025 * 1.2


@pytest.mark.parametrize(
    ("uncached", "link_bytes_s", "seconds"),
    [
        (1000, 1e9, 1.0 + 512e-4),  # short: since the start, and its last chunk is sent
        (10_240, 1e9, (1.024 + 0.02) / 0.9 + 512e-4),  # since its KV had to flow
        (10_240, 1e8, 9.5 + 512e-3),  # a slow link: since its first chunk
        (10_240, 0.0, 9.5),  # an unknown link
    ],
)
def test_pages_are_held_since_the_reservation(
    uncached: float, link_bytes_s: float, seconds: float
) -> None:
    machine = replace(MACHINE, link_bytes_s=link_bytes_s)
    prompt_s = 1.0 if uncached == 1000 else 10.0
    found = early_seconds(machine, machine, RequestSample(uncached, 0.0, 1.0), prompt_s)
    assert found == pytest.approx(seconds)


def test_those_who_decode_have_room() -> None:
    few = demand(mix(1.0))[1]
    many = demand(mix(1.0, residents=10 * few.each, growth_samples=(0.5,)))[1].workers
    assert (few.workers, many) == (1, 10)


def test_decode_pools_have_room_for_growth_of_the_load_and_not_of_chance() -> None:
    load = demand(mix(300.0))[1].load
    peak = load + 2 * math.sqrt(load)
    usual, many = (
        [demand(mix(300.0, residents=n, growth_samples=(g,)))[1].workers for g in (0.0, 0.2, 0.5)]
        for n in (load, peak)
    )
    assert usual == many == [17, 18, 21]


def test_long_answers_take_the_place_of_the_present_sequences_in_part() -> None:
    """They take 200 s, so that until twice a start has passed, 45% of the present 400 sequences
    have ended, whatever arrives from now on."""
    load = mix(10.0, output=4000, residents=400.0)
    slow = replace(MACHINE, step=(0.05, 0.0, 0.0, 1e-4, 0.0), kv_tokens=10_000_000, max_batch=100)
    later, soon, still = (demand(load, slow, start_s=s)[1] for s in (math.inf, 60.0, 0.0))
    assert later.load == pytest.approx(2000, rel=0.01)
    assert soon.load == pytest.approx(400 + (1 - math.exp(-120 / 200)) * 1600, rel=0.01)
    assert still.load == pytest.approx(400, rel=0.01)
    assert later.workers > soon.workers > still.workers >= 4
    none, one = (demand(replace(load, residents=n), slow, start_s=60.0)[1] for n in (0.0, 1.0))
    assert none.load == pytest.approx((1 - math.exp(-120 / 200)) * 2000, rel=0.01)
    assert one.workers == none.workers, "whether the first one has begun to decode is chance"
    short = mix(200.0, output=200, residents=400.0)
    assert demand(short, slow, start_s=60.0)[1].workers == demand(short, slow)[1].workers


def test_present_sequences_and_those_of_the_mix_are_counted_apart() -> None:
    """A few long conversations beside a wave of short requests once made pools eight times too
    large."""
    load = mix(300.0, residents=50.0, resident_kv=50.0 * 20_000)
    for growth in ((), (0.0,)):
        needed = demand(replace(load, growth_samples=growth), start_s=60.0)[1]
        assert needed.workers == needed.lasting == demand(mix(300.0))[1].workers


@pytest.mark.parametrize("output", [20, 50, 200])
def test_prompts_on_decode_workers_leave_them_time_to_decode(output: int) -> None:
    load = mix(60.0, output=output)
    found = demand_by_role(load, {"decode": MACHINE}, GOALS, NO_CORRECTIONS, most_prefill=0)
    needed, load_s = found["decode"], found["prefill"].load
    assert not needed.infeasible
    batch = 60.0 * output * GOALS.tpot_s / needed.workers
    alone_s = StepModel(*MACHINE.step).decode_s(round(batch), 1000.0 * batch)
    assert alone_s / (1.0 - load_s / needed.workers) < GOALS.tpot_s


def test_prompts_of_decode_workers_cross_no_link() -> None:
    slow = replace(MACHINE, link_bytes_s=2e7)
    few, many = (
        demand_by_role(mix(60.0), {"decode": machine}, GOALS, NO_CORRECTIONS, most_prefill=0)
        for machine in (MACHINE, slow)
    )
    assert many["prefill"].link_floor > 100
    assert few["decode"].workers == many["decode"].workers


def test_decode_workers_compute_what_prefill_workers_may_not() -> None:
    load = mix(60.0)
    prefill, decode = demand(load)
    machines, none = {"decode": MACHINE}, NO_CORRECTIONS
    needs = [
        demand_by_role(load, machines, GOALS, none, most_prefill=most)["decode"].workers
        for most in (prefill.workers, prefill.workers - 1, 0)
    ]
    assert needs[0] == decode.workers
    assert decode.workers < needs[1] < needs[2] <= 2 * (prefill.workers + decode.workers)
    assert needs[2] > prefill.workers + decode.workers - 1


def test_workers_that_coming_sequences_will_need_are_not_spare() -> None:
    slow = replace(MACHINE, step=(0.05, 0.0, 0.0, 1e-4, 0.0), kv_tokens=10_000_000, max_batch=100)
    start, end = (
        demand(mix(10.0, output=4000, residents=n), slow, start_s=60.0)[1] for n in (0.0, 2000.0)
    )
    assert start.workers < start.lasting == end.workers == end.lasting


def test_present_sequences_count_with_the_kv_that_they_hold() -> None:
    load = mix(1.0, residents=100.0)
    small, large = (
        demand(replace(load, resident_kv=kv * load.residents), start_s=0.0)[1]
        for kv in (1000.0, 10_000.0)
    )
    assert small.workers < large.workers == math.ceil(100 * 10_000 / 95_000)


def test_bursts_of_arrivals_need_room_for_their_sequences() -> None:
    steady = mix(10.0, output=2000)
    counts = ((20.0,) * 12 + (80.0,) * 12) * 12
    bursts = replace(steady, arrivals=Arrivals(5.0, counts))
    one, more = (demand(load)[1] for load in (steady, bursts))
    assert more.workers > one.workers
    quick = replace(bursts, samples=(RequestSample(1000, 0.0, 2.0),))
    assert demand(quick)[1].workers >= demand(replace(quick, arrivals=Arrivals()))[1].workers


def test_the_load_is_known_less_well_where_requests_come_in_bursts() -> None:
    service = prefill_service(mix(10.0), MACHINE)
    counts = ((20.0,) * 24 + (80.0,) * 24) * 6
    steady, bursts = mix(10.0), mix(10.0, arrivals=Arrivals(5.0, counts))
    assert load_error(steady, service) == pytest.approx(math.sqrt(1 / 600))
    assert load_error(bursts, service) > 2 * load_error(steady, service)
    assert load_error(replace(bursts, window_s=0.0), service) == 0.0


def test_an_objective_out_of_reach_costs_no_pool() -> None:
    """TPOT of a single sequence is 10 ms: nearly that needs the smallest batches."""
    slow = replace(MACHINE, kv_tokens=0, max_batch=999)
    goals = [replace(GOALS, tpot_s=ms / 1e3) for ms in (50.0, 11.2, 10.5, 3.0)]
    needs = [demand(mix(100.0), slow, g)[1] for g in goals]
    assert [need.infeasible for need in needs] == [False, False, True, True]
    assert needs[0].workers < needs[2].workers <= needs[1].workers > needs[3].workers


# ---- both ---------------------------------------------------------------------------------------


def test_the_network_floors_both() -> None:
    found = demand(mix(20.0), replace(MACHINE, link_bytes_s=1e8))
    floor = math.ceil(20 * 1000 * 1e5 / (0.8 * 1e8))
    assert {need.link_floor for need in found} == {need.workers for need in found} == {floor}


def test_without_requests() -> None:
    found = demand_by_role(mix(0.0, samples=()), {"decode": MACHINE}, GOALS, NO_CORRECTIONS)
    assert [need.workers for need in found.values()] == [0, 0]


def test_corrections_make_work_heavier() -> None:
    plain = demand(mix(30.0))
    twice = demand(mix(30.0), corrections=Corrections(prefill=2.0, decode=2.0))
    assert twice[0].load == pytest.approx(2 * plain[0].load)
    assert twice[1].workers > plain[1].workers


def test_predictions() -> None:
    idle = predict_latency(mix(0.01), BOTH, ONE_EACH)
    assert idle.ttft_s == pytest.approx(0.01 + 0.12, rel=0.01)
    assert idle.tpot_s == pytest.approx(0.01 + 0.0001 + 1e-8 * 1100, rel=0.01)
    flooded = predict_latency(mix(99.0), BOTH, ONE_EACH)
    assert flooded.ttft_s is None and flooded.tpot_s is None
    assert predict_latency(mix(0.0, samples=()), BOTH, ONE_EACH).ttft_s is None


def test_a_lent_worker_is_worth_what_it_computes() -> None:
    slow = replace(MACHINE, step=(0.02, 0.0002, 2e-8, 2e-4, 0.0))
    machines: dict[Role, MachineModel] = {"prefill": MACHINE, "decode": slow}
    assert relative_speed("prefill", "decode", mix(1.0), machines, GOALS) == pytest.approx(0.5)
    assert relative_speed("decode", "decode", mix(1.0), machines, GOALS) == 1.0
    assert relative_speed("decode", "prefill", mix(1.0), machines, GOALS) > 1.0


@pytest.mark.parametrize("start_s", [1.0, 60.0, math.inf])
@pytest.mark.parametrize(("tokens", "link"), [(1e12, 0.0), (1e6, 5e-324)])
def test_absurd_reports_make_no_long_decision(start_s: float, tokens: float, link: float) -> None:
    """A queue that no pool computes, and a link that carries nothing."""
    load, machine = mix(1.0, backlog_tokens=tokens), replace(MACHINE, link_bytes_s=link)
    began = time.thread_time()
    found = demand(load, machine, start_s=start_s)
    assert time.thread_time() - began < 1.0
    assert found[0].workers >= LARGEST_LOAD or (start_s == math.inf and not link)
