"""The decision of a step: how many prompt tokens go into it. One pure function for each role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec


class StepState(msgspec.Struct, frozen=True):
    """What a policy may look at."""

    decoding: int  # sequences that decode one token in this step
    remaining: Sequence[int]  # uncomputed tokens of each sequence in prefill, oldest first
    chunk: int  # most prompt tokens that the configuration allows in a step


Policy: TypeAlias = Callable[[StepState], list[int]]
"""Tokens to compute for each entry of ``remaining``; zeros are allowed, more than remaining not."""


def fill_in_order(remaining: Sequence[int], budget: int) -> list[int]:
    """Give the budget to the oldest first."""
    counts = []
    for tokens in remaining:
        count = min(tokens, budget)
        counts.append(count)
        budget -= count
    return counts
