"""What a decode worker puts into a step."""

from __future__ import annotations

from engine.scheduling.step_policy import StepState, fill
from engine.scheduling.step_time import Work

STEP_BUDGET_S = 0.05
"""A step with decoding sequences lasts about as long at most: prompts computed here leave the
inter-token latency of the others where a reader still takes it for a stream."""


def plan(state: StepState) -> list[int]:
    """Decoding goes on in every step; prompts take what is left of its budget. Where decoding alone
    takes most of it, they get as long as decoding: else rows would wait for their prompts in vain.
    """
    decoding = Work(state.decoding, state.decode_kv_tokens)
    alone = 0.0 if state.step_time is None else state.step_time.seconds(decoding)
    return fill(state, max(STEP_BUDGET_S, 2 * alone))
