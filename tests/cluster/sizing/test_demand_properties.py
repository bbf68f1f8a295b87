"""Small errors of the inputs change demand little, and more requests need more workers."""

from __future__ import annotations

import math
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cluster.sizing.demand import demand_by_role
from cluster.sizing.snapshot import (
    NO_ARRIVALS,
    NO_CORRECTIONS,
    Arrivals,
    MachineModel,
    RequestMix,
    RequestSample,
    SloTargets,
)
from protocol.performance.speculation_profile import SpeculationProfile

NOISE = 0.05
SAMPLES = st.lists(
    st.builds(
        RequestSample, st.floats(50, 8000), st.floats(0, 4000), st.floats(100, 2000), st.just(1.0)
    ),
    min_size=1,
    max_size=8,
).map(tuple)
BURSTS = st.builds(
    lambda counts, times: Arrivals(5.0, tuple(map(float, counts)) * times),
    st.lists(st.integers(0, 400), min_size=12, max_size=60),
    st.integers(1, 10),
)
MIXES = st.builds(
    RequestMix,
    rate=st.floats(0.1, 100),
    window_s=st.sampled_from([0.0, 15.0, 60.0, 300.0]),
    arrivals=st.one_of(st.just(NO_ARRIVALS), BURSTS),
    samples=SAMPLES,
    growth_samples=st.lists(st.floats(0, 1), max_size=60).map(tuple),
    backlog_tokens=st.one_of(st.just(0.0), st.floats(1e3, 1e6)),
    residents=st.one_of(st.just(0.0), st.floats(1, 500)),
    resident_kv=st.one_of(st.just(0.0), st.floats(1e3, 1e6)),
)
DRAFTS = SpeculationProfile(accept=(0.8, 0.7, 0.6), per_pass_s=1e-3, row_s=1e-4)
MACHINES = st.builds(
    MachineModel,
    step=st.tuples(
        st.floats(0.002, 0.02), st.floats(0, 1e-4), st.floats(1e-9, 5e-8), st.floats(2e-5, 3e-4),
        st.floats(0, 1e-9),
    ),
    chunk=st.just(10**6),  # a prompt of one chunk more is a step longer, which is no noise
    max_batch=st.sampled_from([64, 256]),
    kv_tokens=st.sampled_from([0, 200_000, 800_000]),
    kv_bytes=st.just(1e5),
    link_bytes_s=st.sampled_from([0.0, 1e10]),
    speculation=st.sampled_from([None, DRAFTS]),
)  # fmt: skip
# A batch within TPOT depends on what a step leaves: nearly all of it is ill-conditioned.
GOALS = st.builds(
    SloTargets, ttft_s=st.sampled_from([0.2, 1.0, 4.0, 30.0]), tpot_s=st.floats(0.05, 0.2)
)


class Situation(NamedTuple):
    """All that demand depends on."""

    mix: RequestMix
    machine: MachineModel
    goals: SloTargets
    start_s: float

    def workers(self) -> dict[str, int]:
        machines = {"prefill": self.machine, "decode": self.machine}
        found = demand_by_role(self.mix, machines, self.goals, NO_CORRECTIONS, self.start_s)  # type: ignore[arg-type]
        return {role: need.workers for role, need in found.items()}


SITUATIONS = st.builds(Situation, MIXES, MACHINES, GOALS, st.sampled_from([5.0, 60.0, 300.0]))
MIX_FIELDS = ("rate", "window_s", "backlog_tokens", "residents", "resident_kv")
SAMPLE_FIELDS = ("uncached", "cached", "output")


def changed(of: Situation, name: str, factor: float) -> Situation:
    """The situation with one of its inputs multiplied."""
    if name == "growth_samples":
        grown = tuple(x * factor for x in of.mix.growth_samples)
        return of._replace(mix=replace(of.mix, growth_samples=grown))
    if name in MIX_FIELDS:
        return of._replace(mix=replace(of.mix, **{name: getattr(of.mix, name) * factor}))
    if name == "arrivals":
        counts = tuple(n * factor if i % 2 else n for i, n in enumerate(of.mix.arrivals.counts))
        return of._replace(mix=replace(of.mix, arrivals=replace(of.mix.arrivals, counts=counts)))
    if name in SAMPLE_FIELDS:
        samples = (replace(s, **{name: getattr(s, name) * factor}) for s in of.mix.samples)
        return of._replace(mix=replace(of.mix, samples=tuple(samples)))
    if name.startswith("step"):
        step = list(of.machine.step)
        step[int(name[-1])] *= factor
        return of._replace(machine=replace(of.machine, step=tuple(step)))
    if name == "kv_tokens":
        kv_tokens = int(of.machine.kv_tokens * factor)
        return of._replace(machine=replace(of.machine, kv_tokens=kv_tokens))
    if name == "start_s":
        return of._replace(start_s=of.start_s * factor)
    return of._replace(goals=replace(of.goals, **{name: getattr(of.goals, name) * factor}))


INPUTS = (
    *MIX_FIELDS, "growth_samples", "arrivals", *SAMPLE_FIELDS, "kv_tokens", "start_s", "ttft_s",
    "tpot_s", *(f"step{i}" for i in range(5)),
)  # fmt: skip


@settings(max_examples=settings.default.max_examples // 2)
@given(SITUATIONS)
def test_an_error_of_five_percent_changes_a_worker_or_ten_percent(of: Situation) -> None:
    """Rounded up to a worker."""
    before = of.workers()
    for name in INPUTS:
        for factor in (1.0 - NOISE, 1.0 + NOISE):
            for role, count in changed(of, name, factor).workers().items():
                low, high = sorted((before[role], count))
                assert high - low <= math.ceil(0.1 * high), (name, factor, role, low, high)


@given(SITUATIONS, st.floats(0, 1))
def test_more_growth_needs_no_fewer_workers(of: Situation, more: float) -> None:
    grown = tuple(x + more * (1.0 - x) for x in of.mix.growth_samples)
    before, after = of.workers(), of._replace(mix=replace(of.mix, growth_samples=grown)).workers()
    assert all(after[role] >= before[role] for role in before)


@given(SITUATIONS, st.floats(1.0, 3.0))
def test_more_requests_need_no_fewer_workers(of: Situation, factor: float) -> None:
    of = changed(of, "backlog_tokens", 0.0)  # of the same backlog, more is computed
    before, after = of.workers(), changed(of, "rate", factor).workers()
    assert all(after[role] >= before[role] for role in before)
