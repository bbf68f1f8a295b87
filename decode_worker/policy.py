"""What a decode worker puts into a step."""

from __future__ import annotations

from engine.policy import StepState, fill

STEP_BUDGET_S = 0.05
"""A step with decoding sequences lasts about as long at most: prompts computed here leave the
inter-token latency of the others where a reader still takes it for a stream."""


def plan(state: StepState) -> list[int]:
    """Decoding goes on in every step; prompts take what is left of its budget."""
    return fill(state, STEP_BUDGET_S)
