"""Counters of what an engine process has done since it started, and the status of speculation.

The engine updates them with a few additions per step and sends all of them with every beat, so no
message is needed per token. The front adds up the counters of its successive engines.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Self

import msgspec

from engine.ipc.settings import MAX_DRAFT_TOKENS


class _Counters(msgspec.Struct, array_like=True):
    def plus(self, other: Self) -> Self:
        """Return the sum, field by field."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in self.__struct_fields__)
        return type(self)(*(_sum(a, b) for a, b in pairs))


def _sum(a: Any, b: Any) -> Any:
    if isinstance(a, list):
        return [x + y for x, y in zip(a, b, strict=True)]
    return a.plus(b) if isinstance(a, _Counters) else a + b


class WorkDone(_Counters):
    """The computed work and the elapsed time of an engine, summed over all steps."""

    flops: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    decode_steps: int = 0  # steps with decoding sequences
    seconds: float = 0.0  # of the step loop, including idle time
    kv_seconds: float = 0.0  # weighted by the share of the pool in use, which is 1 while starved
    starved_seconds: float = 0.0  # during which the first sequence in the queue lacked pages

    def add_time(self, seconds: float, kv_used: float, *, starved: bool) -> None:
        """Add ``seconds`` during which the share ``kv_used`` of the pool was in use."""
        self.seconds += seconds
        self.kv_seconds += seconds * (1.0 if starved else kv_used)
        self.starved_seconds += seconds * starved


STEP_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5),
    *(1.0, 2.5),
)
BATCH_SIZE = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512)


class BucketCounts(_Counters):
    """A histogram over edges that both processes know."""

    counts: list[int]  # [edges + 1], the last one for larger values
    total: float = 0.0  # sum of the values

    @classmethod
    def over(cls, edges: Sequence[float]) -> BucketCounts:
        return cls([0] * (len(edges) + 1))

    def add(self, value: float, edges: Sequence[float]) -> None:
        """Count ``value``; a value at an edge belongs to the bucket below the edge."""
        self.counts[bisect_left(edges, value)] += 1
        self.total += value


class SpeculationCounters(_Counters):
    """What speculation has done. A draft is all tokens proposed for one sequence in one step."""

    steps: int = 0  # steps with drafts
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    # [MAX_DRAFT_TOKENS] number of drafts with more than ``index`` accepted tokens
    accepted_beyond: list[int] = msgspec.field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)
    draft_seconds: float = 0.0
    load_failures: int = 0  # proposers that could not be loaded
    crashes: int = 0  # proposers that failed while drafting, and were dropped

    def step(self, proposed: Sequence[int], accepted: Sequence[int], draft_s: float) -> None:
        """Count a step from the numbers of ``proposed`` and ``accepted`` tokens per sequence."""
        self.draft_seconds += draft_s
        drafts = sum(1 for count in proposed if count)
        if not drafts:
            return
        self.steps += 1
        self.drafts += drafts
        self.draft_tokens += sum(proposed)
        self.accepted_tokens += sum(accepted)
        for count in accepted:
            for position in range(min(count, MAX_DRAFT_TOKENS)):
                self.accepted_beyond[position] += 1


class SpeculationStatus(msgspec.Struct, array_like=True, frozen=True):
    """The state of speculation. Speed-ups are ratios of tokens per second, of steps with drafts to
    plain steps."""

    proposer: str = ""  # ngram, draft, medusa or eagle; empty: none
    dropped: str = ""  # the error that stopped the proposer, when loading or later
    predicted_speedup: float = 1.0
    measured_speedup: float = 1.0

    @property
    def active(self) -> bool:
        return bool(self.proposer) and not self.dropped

    def __str__(self) -> str:
        return f"dropped: {self.dropped}" if self.dropped else self.proposer or "off"


class EngineCounters(_Counters):
    """All counters of one engine process. ``step_seconds`` has the edges STEP_SECONDS, and
    ``batch_size``, in sequences, the edges BATCH_SIZE."""

    prefill_tokens: int = 0  # computed, again after each preemption
    generated_tokens: int = 0
    preemptions: int = 0
    cache_queries: int = 0  # context tokens looked up in the prefix cache
    cache_hits: int = 0  # context tokens found there
    step_seconds: BucketCounts = msgspec.field(
        default_factory=lambda: BucketCounts.over(STEP_SECONDS)
    )
    batch_size: BucketCounts = msgspec.field(default_factory=lambda: BucketCounts.over(BATCH_SIZE))
    decode_rows: int = 0  # decoding sequences, summed over the steps
    speculation: SpeculationCounters = msgspec.field(default_factory=SpeculationCounters)
    done: WorkDone = msgspec.field(default_factory=WorkDone)

    def add_lookup(self, tokens: int, cached: int) -> None:
        """Count an admitted context of ``tokens`` tokens, of which ``cached`` were found."""
        self.cache_queries += tokens
        self.cache_hits += cached

    def step(self, prompt_tokens: int, sequences: int, drawn: int, seconds: float) -> None:
        self.prefill_tokens += prompt_tokens
        self.generated_tokens += drawn
        self.step_seconds.add(seconds, STEP_SECONDS)
        self.batch_size.add(sequences, BATCH_SIZE)
