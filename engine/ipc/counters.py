"""What an engine process has done since it started: a few additions a step. Torch-free.

Each beat carries all of it, so that nothing is sent for a token; a front adds up the lives of its
engines.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from engine.ipc.spec import MOST_DRAFTED

# MERGED engine.work_done
# The work that an engine has done, and how its time went by. Torch-free.


class WorkDone(msgspec.Struct, array_like=True):
    """Sums over all steps, and over the time of the loop that runs them."""

    flops: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    decode_steps: int = 0  # in which anybody decoded
    seconds: float = 0.0  # of the loop, idle or not
    kv_seconds: float = 0.0  # times the share of the pool in use; all of it while it lacks pages
    starved_seconds: float = 0.0  # in which the first in the queue waited for pages

    def passed(self, seconds: float, kv_used: float, *, starved: bool) -> None:
        """Time in which the share ``kv_used`` of the pool was in use."""
        self.seconds += seconds
        self.kv_seconds += seconds * (1.0 if starved else kv_used)
        self.starved_seconds += seconds * starved

    def plus(self, other: WorkDone) -> WorkDone:
        return WorkDone(*(getattr(self, f) + getattr(other, f) for f in self.__struct_fields__))


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


class SpecCounts(msgspec.Struct, array_like=True):
    """What speculation has done. A draft is what one sequence was proposed in one step."""

    steps: int = 0  # in which anybody was proposed anything
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    # [MOST_DRAFTED] drafts of which more than so many tokens were accepted
    accepted_beyond: list[int] = msgspec.field(default_factory=lambda: [0] * MOST_DRAFTED)
    draft_seconds: float = 0.0
    load_failures: int = 0  # proposers that could not be had
    crashes: int = 0  # proposers that failed at work, and were dropped

    def step(self, proposed: Sequence[int], accepted: Sequence[int], draft_s: float) -> None:
        """For each of a step's sequences the tokens it was proposed, and those it accepted."""
        self.draft_seconds += draft_s
        drafts = sum(1 for count in proposed if count)
        if not drafts:
            return
        self.steps += 1
        self.drafts += drafts
        self.draft_tokens += sum(proposed)
        self.accepted_tokens += sum(accepted)
        for count in accepted:
            for position in range(min(count, MOST_DRAFTED)):
                self.accepted_beyond[position] += 1

    def plus(self, other: SpecCounts) -> SpecCounts:
        pairs = zip(self.accepted_beyond, other.accepted_beyond, strict=True)
        return SpecCounts(
            self.steps + other.steps,
            self.drafts + other.drafts,
            self.draft_tokens + other.draft_tokens,
            self.accepted_tokens + other.accepted_tokens,
            [a + b for a, b in pairs],
            self.draft_seconds + other.draft_seconds,
            self.load_failures + other.load_failures,
            self.crashes + other.crashes,
        )


class SpecFigures(msgspec.Struct, array_like=True, frozen=True):
    """How speculation stands. ``proposer``: ngram, draft, medusa, eagle; empty: there is none.
    ``dropped``: why there is none any more, or never was; empty where nothing went wrong. Speed-ups
    are tokens per second of the steps that speculate, over those of plain ones."""

    proposer: str = ""
    dropped: str = ""
    predicted_speedup: float = 1.0
    measured_speedup: float = 1.0

    @property
    def active(self) -> bool:
        return bool(self.proposer) and not self.dropped

    def __str__(self) -> str:
        return f"dropped: {self.dropped}" if self.dropped else self.proposer or "off"


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
    decode_rows: int = 0  # sequences that decoded, those of each step
    speculation: SpecCounts = msgspec.field(default_factory=SpecCounts)
    done: WorkDone = msgspec.field(default_factory=WorkDone)

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
            self.decode_rows + other.decode_rows,
            self.speculation.plus(other.speculation),
            self.done.plus(other.done),
        )
