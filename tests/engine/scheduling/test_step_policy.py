"""How many prompt tokens go into a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling import step_policy as decode_policy
from engine.scheduling import step_policy as prefill_policy
from engine.scheduling.step_policy import StepState
from engine.scheduling.step_time import Coefficients, StepWork

COST = Coefficients(step=5e-3, row=1e-4, kv_token=1e-7, prompt_token=1e-4, prompt_pair=1e-8)


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
        budget_s=draw(st.sampled_from([None, 0.0, 0.01, 0.1])),
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


@given(state=states())
def test_chunks_use_the_step_budget_without_exceeding_it(state: StepState) -> None:
    counts = decode_policy.plan_decode_step(state)
    budget = decode_policy.DECODE_STEP_BUDGET_S if state.budget_s is None else state.budget_s
    bounded = state.decoding and budget and state.step_time
    if not bounded or sum(counts) <= 32:
        return
    assert seconds(state, counts) <= budget + 1e-9
    if sum(counts) < min(state.chunk, sum(state.remaining)):
        first = next(i for i, n in enumerate(counts) if n < state.remaining[i])
        counts[first] += 1
        assert seconds(state, counts) > budget


def state(**changes: object) -> StepState:
    base = {"decoding": 8, "decode_kv_tokens": 8000, "remaining": [4000], "computed": [0]}
    return StepState(**{**base, "chunk": 512, "step_time": COST, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, 427),  # 50 ms are the decode worker's own: 6.6 without a prompt, 43.4 of it
        ({"budget_s": 0.03}, 231),
        ({"budget_s": 0.0}, 512),
        ({"budget_s": 0.001}, 32),
        ({"decoding": 0, "decode_kv_tokens": 0}, 512),
        ({"step_time": None}, 128),
    ],
)
def test_decode_worker_bounds_steps_with_decoding(changes: dict[str, object], tokens: int) -> None:
    assert decode_policy.plan_decode_step(state(**changes)) == [pytest.approx(tokens, abs=3)]


def test_prefill_worker_has_no_step_budget_of_its_own() -> None:
    assert prefill_policy.plan_prefill_step(state()) == [512]
    assert prefill_policy.plan_prefill_step(state(budget_s=0.03)) == decode_policy.plan_decode_step(
        state(budget_s=0.03)
    )
