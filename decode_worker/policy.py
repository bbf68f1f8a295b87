"""What a decode worker puts into a step."""

from __future__ import annotations

from engine.policy import StepState, fill_in_order

BESIDE_DECODE = 4
"""Share of the chunk (1/n) that a prompt may take of a step in which others decode."""


def plan(state: StepState) -> list[int]:
    """Decoding goes on in every step; prompts computed here take a bounded part of it, so that the
    inter-token latency of the others stays near that of a step without them."""
    budget = state.chunk
    if state.decoding:
        budget = max(32, state.chunk // BESIDE_DECODE)
    return fill_in_order(state.remaining, budget)
