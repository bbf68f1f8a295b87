"""A closed loop: so many streams, each sending its next request when the last one has ended."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec

from bench.report import median


@dataclass(frozen=True)
class Workload:
    """``requests`` prompts of random tokens, ``streams`` at a time."""

    streams: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    vocab: int
    seed: int

    def prompts(self) -> list[list[int]]:
        """No two share a prefix, so that no cache helps."""
        draw = random.Random(self.seed)
        return [
            [draw.randrange(3, self.vocab) for _ in range(self.prompt_tokens)]
            for _ in range(self.requests)
        ]


@dataclass
class Timing:
    """When the tokens of one request came, in seconds since it was sent."""

    first: float = 0.0
    last: float = 0.0
    tokens: int = 0

    def token(self, at: float, count: int) -> None:
        if not self.tokens:
            self.first = at
        self.last = at
        self.tokens += count

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first."""
        return (self.last - self.first) / max(1, self.tokens - 1)


class Outcome(msgspec.Struct, frozen=True):
    """Medians over the requests, and tokens per second over the whole run."""

    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float


def summarise(timings: list[Timing], wall_s: float) -> Outcome:
    return Outcome(
        median([t.first for t in timings]) * 1e3,
        median([t.tpot for t in timings]) * 1e3,
        sum(t.tokens for t in timings) / wall_s,
    )
