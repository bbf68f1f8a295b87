"""The step policy of prefill workers, which the scheduler of their engine calls."""

from __future__ import annotations

from engine.scheduling.step_policy import StepState, choose_chunks

STEP_BUDGET_S = 0.0
"""No limit: on a prefill worker no stream waits for its next token."""


def plan(state: StepState) -> list[int]:
    """Return the prompt tokens to compute for each prefill: [prefills].

    The most urgent prompt comes first and may take the whole chunk, so that its TTFT is not spent
    on prompts behind it; a short prompt shares the step with the tail of the one before it."""
    return choose_chunks(state, STEP_BUDGET_S)
