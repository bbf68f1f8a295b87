"""How many prompt tokens go into a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.scheduling import step_policy as decode_policy
from engine.scheduling import step_policy as prefill_policy
from engine.scheduling.sequence import Phase
from engine.scheduling.step_policy import (
    StepBounds,
    StepState,
    decode_step_budget_s,
    plan_decode_step,
    plan_prefill_step,
    short_first,
)
from protocol.performance.step_model import StepModel, StepWork
from router.placement.cost import step_budget_s
from router.placement.snapshot import Objectives
from tests.engine.scheduler_harness import SchedulerHarness, make_request

COST = StepModel(step=5e-3, row=1e-4, kv_token=1e-7, prompt_token=1e-4, prompt_pair=1e-8)


def seconds(state: StepState, counts: list[int]) -> float:
    assert state.step_time is not None
    pairs = sum(n * (m + n / 2) for n, m in zip(counts, state.computed, strict=True))
    work = StepWork(state.decoding, state.decode_kv_tokens, sum(counts), pairs)
    return state.step_time.seconds(work)


@st.composite
def states(draw: st.DrawFn) -> StepState:
    prefills = draw(st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 9000)), min_size=1))
    decoding = draw(st.integers(0, 64))
    return StepState(
        decoding=decoding,
        decode_kv_tokens=decoding * draw(st.integers(1, 4000)),
        remaining=[r for r, _ in prefills],
        computed=[c for _, c in prefills],
        chunk=draw(st.sampled_from([8, 64, 512])),
        bounds=StepBounds(
            draw(st.sampled_from([None, None, 0.0, 0.01, 0.1])),
            *draw(st.sampled_from([(None, None), (2.0, 0.1), (0.5, 0.01)])),
        ),
        step_time=draw(st.sampled_from([COST, COST, COST, None])),
    )


@given(
    state=states(),
    plan=st.sampled_from([decode_policy.plan_decode_step, prefill_policy.plan_prefill_step]),
)
def test_policy_output_is_valid_for_any_state(state: StepState, plan: object) -> None:
    counts = plan(state)  # type: ignore[operator]
    assert len(counts) == len(state.remaining)
    assert all(0 <= n <= r for n, r in zip(counts, state.remaining, strict=True))
    least = min(32, state.chunk, sum(state.remaining))
    assert least <= sum(counts) <= state.chunk
    # In order: who gets less than it wants is the last to get any.
    short = [i for i, (n, r) in enumerate(zip(counts, state.remaining, strict=True)) if n < r]
    assert not short or sum(counts[short[0] + 1 :]) == 0
    if not state.decoding:
        assert sum(counts) == min(state.chunk, sum(state.remaining))


@given(remaining=st.lists(st.integers(1, 4000), min_size=1), chunk=st.sampled_from([64, 512, 2048]))
def test_short_prompts_go_beside_older_ones_in_a_quarter_of_a_step(
    remaining: list[int], chunk: int
) -> None:
    order, short = short_first(remaining, chunk)
    assert sorted(order) == list(range(len(remaining)))
    first, others = order[:short], order[short:]
    assert first == sorted(first) and others == sorted(others)
    assert all(8 * remaining[at] <= chunk for at in first)
    assert 4 * sum(remaining[at] for at in first) <= chunk
    assert not short or (others and others[0] < first[-1]), "they go before nobody"


@given(state=states(), plan=st.sampled_from([plan_decode_step, plan_prefill_step]))
def test_short_prompts_leave_the_longer_ones_most_of_a_step(
    state: StepState, plan: Callable[[StepState], list[int]]
) -> None:
    order, short = short_first(state.remaining, state.chunk)
    remaining, computed = ([of[at] for at in order] for of in (state.remaining, state.computed))
    changed = replace(state, remaining=remaining, computed=computed, short=short)
    counts, alone = plan(changed), plan(replace(changed, remaining=remaining[short:],
                                                computed=computed[short:], short=0))  # fmt: skip
    least = min(32, state.chunk, sum(remaining))
    assert least <= sum(counts) <= state.chunk
    if short and state.step_time is not None and sum(alone) > 32:
        assert sum(counts[:short]) > 0
        assert sum(counts[short:]) > 0.3 * sum(alone)


def test_the_oldest_prompt_goes_on_where_a_step_has_room_for_one_block() -> None:
    full = state(remaining=[20, 20, 4000], short=2, bounds=StepBounds(0.001))
    assert plan_decode_step(full) == [0, 0, 32]


@pytest.mark.parametrize("decoding", [0, 8])
def test_a_short_prompt_waits_for_no_long_one(decoding: int) -> None:
    harness = SchedulerHarness(4000, rows=16, chunk=512)
    long = harness.generate(0, make_request(list(range(20_000))))
    urgent = harness.generate(1, make_request([7] * 20_000, priority=-1))
    for handle in range(decoding):
        harness.generate(100 + handle, make_request([3 + handle], max_tokens=200, priority=-1))
        harness.step()
    harness.step()
    short = [harness.generate(2 + n, make_request([n] * 40)) for n in range(2)]
    before = long.computed
    harness.step()
    assert not any(s.computed for s in short), "a more urgent class is not slowed"
    harness.scheduler.finish(urgent)
    harness.step()
    assert all(s.phase is Phase.DECODE for s in short)
    assert long.computed > before


def own_budget_s(state: StepState) -> float:
    """The decode worker's own budget, from its parts."""
    nothing = state.decoding and [0] * len(state.remaining)
    if not nothing or state.step_time is None:
        return math.inf
    alone_s = seconds(state, nothing)
    prompts_s = seconds(state, list(state.remaining)) - alone_s
    _, ttft_slo_s, tpot_slo_s = state.bounds
    return decode_step_budget_s(alone_s, prompts_s, ttft_slo_s, tpot_slo_s)


@given(state=states())
def test_chunks_use_the_step_budget_without_exceeding_it(state: StepState) -> None:
    counts = decode_policy.plan_decode_step(state)
    budget = own_budget_s(state) if state.bounds.budget_s is None else state.bounds.budget_s
    bounded = state.decoding and budget and state.step_time
    if not bounded or sum(counts) <= 32:
        return
    assert seconds(state, counts) <= budget + 1e-9
    if sum(counts) < min(state.chunk, sum(state.remaining)):
        first = next(i for i, n in enumerate(counts) if n < state.remaining[i])
        counts[first] += 1
        assert seconds(state, counts) > budget


def state(**changes: object) -> StepState:
    base: dict[str, Any] = {"decoding": 8, "decode_kv_tokens": 8000, "remaining": [4000], **changes}
    base["computed"] = [0] * len(base["remaining"])
    return StepState(**{"chunk": 512, "step_time": COST, **base})


# Decoding alone takes 6.6 ms, a prompt of 4,000 tokens 480 ms, and one of 1,000 tokens 105 ms.
@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, 66),  # without objectives prompts get as long as decoding
        ({"bounds": StepBounds(None, 2.0, 0.1)}, 512),  # nearly 100 ms
        ({"bounds": StepBounds(None, 2.0, 0.05)}, 370),  # u = 0.96: 38 ms of prompts
        ({"bounds": StepBounds(None, 2.0, 0.05), "remaining": [1000]}, 66),  # u^2 * 41 < 6.6
        ({"bounds": StepBounds(None, 2.0, 0.05), "remaining": [1000] * 4}, 284),  # u = 0.84
        ({"bounds": StepBounds(None, 2.0, 0.01)}, 32),  # 9.5 ms in all
        ({"bounds": StepBounds(None, 2.0, 0.001)}, 32),  # a block at least
        ({"bounds": StepBounds(0.03, 2.0, 0.1)}, 231),  # a configured budget wins
        ({"bounds": StepBounds(0.03)}, 231),
        ({"bounds": StepBounds(0.0, 2.0, 0.01)}, 512),  # 0: no bound
        ({"bounds": StepBounds(0.001)}, 32),
        ({"decoding": 0, "decode_kv_tokens": 0}, 512),
        ({"step_time": None}, 128),
        ({"step_time": None, "bounds": StepBounds(None, 2.0, 0.01)}, 128),
        ({"step_time": None, "bounds": StepBounds(0.0)}, 512),
    ],
)
def test_decode_worker_bounds_steps_with_decoding(changes: dict[str, object], tokens: int) -> None:
    counts = decode_policy.plan_decode_step(state(**changes))
    assert sum(counts) == pytest.approx(tokens, abs=3)


SMALL_CPU = (0.008, 1.2, 0.013)  # alone, TTFT and TPOT objectives, in seconds
DEFAULT_CPU = (0.008, 2.0, 0.1)
GPU = (0.005, 2.0, 0.05)
FULL_GPU = (0.045, 2.0, 0.05)


@pytest.mark.parametrize(
    ("worker", "prompts_s", "budget_s"),
    [
        # A model of 7M on a CPU core, with four times the latencies of an idle one as objectives.
        (SMALL_CPU, 0.05, 0.01235),
        (SMALL_CPU, 5.0, 0.01235),
        # The same with the default objectives: a chat, a prompt of 1,500, and a queue of them.
        (DEFAULT_CPU, 0.05, 0.016),
        (DEFAULT_CPU, 0.25, 0.02975),
        (DEFAULT_CPU, 0.5, 0.095),
        (DEFAULT_CPU, 5.0, 0.095),
        # An 8B model on an H100: prompts of 1,000 and 8,000 tokens, and a queue.
        (GPU, 0.034, 0.01),
        (GPU, 0.33, 0.0235),
        (GPU, 2.0, 0.0475),
        # Decoding alone takes nearly the objective, or more.
        (FULL_GPU, 0.03, 0.05625),
        ((0.06, 2.0, 0.05), 2.0, 0.075),
    ],
)
def test_default_budget_of_a_decode_worker(
    worker: tuple[float, float, float], prompts_s: float, budget_s: float
) -> None:
    alone_s, ttft_slo_s, tpot_slo_s = worker
    found = decode_step_budget_s(alone_s, prompts_s, ttft_slo_s, tpot_slo_s)
    assert found == pytest.approx(budget_s, rel=0.01)


SECONDS = st.floats(1e-4, 10.0)


@given(alone_s=SECONDS, prompts_s=SECONDS, ttft_slo_s=SECONDS, tpot_slo_s=SECONDS)
def test_default_budget_keeps_the_objective_and_lets_prompts_progress(
    alone_s: float, prompts_s: float, ttft_slo_s: float, tpot_slo_s: float
) -> None:
    budget_s = decode_step_budget_s(alone_s, prompts_s, ttft_slo_s, tpot_slo_s)
    assert budget_s <= max(0.95 * tpot_slo_s, 1.25 * alone_s) * (1 + 1e-9)
    assert budget_s >= 1.25 * alone_s * (1 - 1e-9)
    assert budget_s <= decode_step_budget_s(alone_s, 2 * prompts_s, ttft_slo_s, tpot_slo_s)
    assert budget_s <= decode_step_budget_s(alone_s, prompts_s, ttft_slo_s, 2 * tpot_slo_s)
    # Routers predict the same decision.
    goals = Objectives(ttft_slo_s, tpot_slo_s)
    assert step_budget_s(alone_s, prompts_s, goals) == pytest.approx(budget_s)


def test_prefill_worker_has_no_step_budget_of_its_own() -> None:
    goals = (2.0, 0.01)
    assert prefill_policy.plan_prefill_step(state(bounds=StepBounds(None, *goals))) == [512]
    bounded = state(bounds=StepBounds(0.03, *goals))
    assert prefill_policy.plan_prefill_step(bounded) == decode_policy.plan_decode_step(bounded)
