"""Corrections of the policy's predictions: what is learnt from what workers and clients see."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from cluster.sizing.corrections import bounded_corrections
from cluster.sizing.policy import decide
from cluster.sizing.snapshot import (
    Corrections,
    ObservedLatency,
    SizingMemory,
    SizingSnapshot,
    WorkerSnapshot,
)
from tests.cluster.sizing.worlds import after, mix, snapshot


def computing(state: SizingSnapshot, busy: float, tokens_s: float) -> tuple[WorkerSnapshot, ...]:
    """The workers, of which those for prefill report this."""
    return tuple(
        replace(w, busy=busy, prompt_tokens_s=tokens_s) if w.role == "prefill" else w
        for w in state.workers
    )


def corrected(state: SizingSnapshot, turns: int = 100) -> Corrections:
    """The corrections after so many turns in which the workers report the same."""
    workers = state.workers
    for _ in range(turns):
        state = replace(after(state, decide(state), 5.0), workers=workers)
    return state.memory.corrections


@pytest.mark.parametrize(("busy", "prefill"), [(0.06, 0.5), (0.12, 1.0), (0.18, 1.5), (0.9, 2.0)])
def test_corrections_follow_what_is_seen_within_bounds(busy: float, prefill: float) -> None:
    """A prompt of 1,000 tokens should take 0.12 s."""
    state = snapshot(2, 2, mix(2.0), observed=ObservedLatency(ttft_s=5.0, tpot_s=0.001))
    found = corrected(replace(state, workers=computing(state, busy, 1000.0)))
    assert [found.prefill, found.decode] == pytest.approx([prefill, 0.5], rel=1e-3)
    at_bound = ("prefill", "decode") if busy in (0.06, 0.9) else ("decode",)
    assert bounded_corrections(found) == at_bound


def test_corrections_compare_the_same_requests() -> None:
    """Of prompts of 1,000 tokens, those of 2,000 had their first token. These take 0.24 s."""
    state = snapshot(2, 2, mix(0.5), observed=ObservedLatency(ttft_s=0.3, prompt_tokens=2000))
    found = corrected(replace(state, workers=computing(state, 0.24, 2000.0)))
    assert found.prefill == pytest.approx(1.0)


@pytest.mark.parametrize("ttft_s", [0.01, 9.0])
def test_waits_are_no_work(ttft_s: float) -> None:
    state = snapshot(2, 2, mix(2.0), observed=ObservedLatency(ttft_s=ttft_s))
    assert corrected(replace(state, workers=computing(state, 0.12, 1000.0))).prefill == (
        pytest.approx(1.0)
    )


def test_a_correction_forgets_while_workers_change() -> None:
    """A load that grows changes the pools all the time."""
    state = snapshot(2, 2, mix(2.0))
    slow = replace(state, workers=computing(state, 0.24, 1000.0))
    for busy, least, most in ((0.24, 1.9, 2.0), (0.12, 1.0, 1.1)):
        for _ in range(300):
            now = after(slow, decide(slow), 5.0)
            changing = replace(now.workers[0], state="warming")
            workers = (changing, *now.workers[1:])
            slow = replace(now, workers=computing(replace(now, workers=workers), busy, 1000.0))
        assert least <= slow.memory.corrections.prefill <= most


def test_little_work_corrects_little() -> None:
    state = snapshot(2, 2, mix(2.0))
    state = replace(state, workers=computing(state, 0.02, 10.0))  # 0.0012 s in each second
    assert corrected(state).prefill == pytest.approx(1.05, abs=0.001)  # 10 of 200 requests


@pytest.mark.parametrize(
    ("rate", "ratio", "correction"), [(2.0, 1.25, 1.0), (2.0, 1.56, 1.2), (36.0, 1.56, 1.0)]
)
def test_waits_for_pages_are_no_work(rate: float, ratio: float, correction: float) -> None:
    """36 requests/s are too many for two decode workers."""
    state = snapshot(9, 2, mix(rate))
    told = decide(state).predicted.tpot_s
    assert told is not None
    seen = ObservedLatency(tpot_s=ratio * told)
    for _ in range(100):
        made = decide(replace(state, observed=seen))
        state = replace(after(state, made, 5.0), workers=state.workers)
    assert state.memory.corrections.decode == pytest.approx(correction, rel=0.02)


def test_requests_that_began_before_a_change_are_no_observation() -> None:
    """Answers of 200 tokens at 0.05 s take 10 s longer than the window."""
    seen = ObservedLatency(ttft_s=0.9, tpot_s=0.05)
    for changed_s, learns in ((931.0, False), (929.0, True)):
        memory = SizingMemory(last_change_s=changed_s)
        made = decide(snapshot(2, 2, mix(2.0), observed=seen, memory=memory))
        assert (made.memory.corrections != Corrections(prefill=1, decode=1)) == learns


def test_the_kv_of_residents_is_learnt_while_workers_change_too() -> None:
    """Samples know nothing of prompts and answers together."""
    state = snapshot(2, 2, mix(2.0, residents=100.0))
    told = decide(state).predicted.kv_tokens
    assert told is not None and 1000 + 100 < told < 1200  # with KV of prompts under way
    for role_state, share in (("serving", 0.6), ("warming", 0.4)):
        held = tuple(
            replace(w, state=role_state, kv_tokens=int(50 * told * share))
            if w.role == "decode" else w
            for w in state.workers
        )  # fmt: skip
        for _ in range(100):
            state = replace(after(state, decide(state), 5.0), workers=held)
        assert state.memory.corrections.kv == pytest.approx(max(0.5, share), rel=0.01)
        expected = decide(state).predicted.kv_tokens
        assert expected == pytest.approx(told * max(0.5, share), rel=0.06)


@pytest.mark.parametrize(("rate", "correction"), [(0.1, 0.9875), (2.0, 0.75)])
def test_few_requests_tell_little_of_kv(rate: float, correction: float) -> None:
    """Those that are there hold half of what they should, for 50 s."""
    state = snapshot(2, 2, mix(rate, residents=10.0))
    told = decide(state).predicted.kv_tokens
    assert told is not None
    held = tuple(replace(w, kv_tokens=int(2.5 * told)) for w in state.workers)
    for _ in range(11):
        state = replace(after(state, decide(state), 5.0), workers=held)
    assert state.memory.corrections.kv == pytest.approx(correction, abs=0.01)


def test_nothing_is_learnt_while_workers_change() -> None:
    state = snapshot(2, 2, mix(2.0), observed=ObservedLatency(ttft_s=5.0, tpot_s=0.5))
    warming = (replace(state.workers[0], state="warming"), *state.workers[1:])
    assert decide(replace(state, workers=warming)).memory.corrections == Corrections(
        prefill=1, decode=1
    )
