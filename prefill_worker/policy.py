"""What a prefill worker puts into a step."""

from __future__ import annotations

from engine.scheduling.step_policy import StepState, fill

STEP_BUDGET_S = 0.0
"""No bound: here nobody waits for the next token of a stream."""


def plan(state: StepState) -> list[int]:
    """Most urgent prompt first, with the whole chunk: TTFT of those ahead is not spent on those
    behind, and a short prompt shares the step with the tail of the one before it."""
    return fill(state, STEP_BUDGET_S)
