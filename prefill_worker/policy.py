"""What a prefill worker puts into a step."""

from __future__ import annotations

from engine.policy import StepState, fill_in_order


def plan(state: StepState) -> list[int]:
    """Oldest prompt first, with the whole budget: TTFT of those ahead is not spent on those
    behind, and a short prompt shares the step with the tail of the one before it."""
    return fill_in_order(state.remaining, state.chunk)
