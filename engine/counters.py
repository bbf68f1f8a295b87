"""What an engine process has done since it started: a few additions a step. Torch-free.

Each beat carries all of it, so that nothing is sent for a token; a front adds up the lives of its
engines.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

STEP_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5),
    *(1.0, 2.5),
)
BATCH_SIZE = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512)


class Tally(msgspec.Struct, array_like=True):
    """A histogram over edges that both sides know: ``counts`` has one more, for what lies above."""

    counts: list[int]
    total: float = 0.0  # of the values

    @classmethod
    def over(cls, edges: Sequence[float]) -> Tally:
        return cls([0] * (len(edges) + 1))

    def add(self, value: float, edges: Sequence[float]) -> None:
        """Values at an edge count below it."""
        self.counts[bisect_left(edges, value)] += 1
        self.total += value

    def plus(self, other: Tally) -> Tally:
        counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        return Tally(counts, self.total + other.total)


class Counters(msgspec.Struct, array_like=True):
    """``step_seconds`` over STEP_SECONDS, and ``batch_size``, the sequences of a step, over
    BATCH_SIZE."""

    prefill_tokens: int = 0  # computed, those of preempted sequences again
    generated_tokens: int = 0
    preemptions: int = 0
    cache_queries: int = 0  # tokens of contexts that were looked for in the prefix cache here
    cache_hits: int = 0
    step_seconds: Tally = msgspec.field(default_factory=lambda: Tally.over(STEP_SECONDS))
    batch_size: Tally = msgspec.field(default_factory=lambda: Tally.over(BATCH_SIZE))

    def looked_up(self, tokens: int, cached: int) -> None:
        """A context came to its turn, with ``cached`` of its ``tokens`` here already."""
        self.cache_queries += tokens
        self.cache_hits += cached

    def step(self, prompt_tokens: int, sequences: int, drawn: int, seconds: float) -> None:
        self.prefill_tokens += prompt_tokens
        self.generated_tokens += drawn
        self.step_seconds.add(seconds, STEP_SECONDS)
        self.batch_size.add(sequences, BATCH_SIZE)

    def plus(self, other: Counters) -> Counters:
        return Counters(
            self.prefill_tokens + other.prefill_tokens,
            self.generated_tokens + other.generated_tokens,
            self.preemptions + other.preemptions,
            self.cache_queries + other.cache_queries,
            self.cache_hits + other.cache_hits,
            self.step_seconds.plus(other.step_seconds),
            self.batch_size.plus(other.batch_size),
        )
