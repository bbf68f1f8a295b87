"""The step policy of decode workers, which the scheduler of their engine calls."""

from __future__ import annotations

from engine.scheduling.step_policy import StepState, choose_chunks
from engine.scheduling.step_time import StepWork

STEP_BUDGET_S = 0.05
"""Longest step, roughly, while sequences decode: prompts that are computed here must leave the
inter-token latency of the others where the output still reads as a stream."""


def plan(state: StepState) -> list[int]:
    """Return the prompt tokens to compute for each prefill: [prefills].

    Decoding goes on in every step, and prompts take the rest of its budget. Where decoding alone
    takes most of the budget, prompts get as long as decoding, because otherwise sequences would
    leave the batch faster than new ones join it."""
    decoding = StepWork(state.decoding, state.decode_kv_tokens)
    alone = 0.0 if state.step_time is None else state.step_time.seconds(decoding)
    return choose_chunks(state, max(STEP_BUDGET_S, 2 * alone))
