"""What a contestant's steps were, and what the formula makes of it.

Expected tokens of a step are (1 - a^(K+1)) / (1 - a) where each of K drafts in a chain is accepted
with probability a, given those before it (Leviathan et al., 2023, equation 1). Over a plain step of
one, a step with drafts takes as much longer as its pass takes longer, and what proposing takes.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from engine.model import Model
from engine.sequence import Sequence as Running
from engine.speculation.choice import expected_tokens
from engine.speculation.lengths import Lengths, Outcome

RESAMPLES = 1000
Clock = Callable[[], float]


@dataclass
class Seen:
    """Sums over the steps that count."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    pass_s: float = 0.0  # of the model itself
    draft_s: float = 0.0  # of proposing
    lengths: Counter[int] = field(default_factory=Counter)  # of drafts: 0 is none
    accepted: int = 0
    rejected: int = 0  # drafts that were not accepted as a whole
    trees: bool = False

    def add(self, outcome: Outcome) -> None:
        self.draft_s += outcome.draft_s
        if not outcome.proposed:
            self.lengths[0] += len(outcome.sequences)
            return
        self.lengths.update(outcome.proposed)
        for count, nodes in zip(outcome.proposed, outcome.accepted, strict=True):
            self.accepted += len(nodes)
            self.rejected += len(nodes) < count
            self.trees |= list(nodes) != list(range(len(nodes)))

    @property
    def acceptance(self) -> float:
        """Of a draft's next token, given those before it."""
        tested = self.accepted + self.rejected
        return self.accepted / tested if tested else 0.0

    @property
    def each(self) -> float:
        """Tokens of a sequence in a step."""
        return 1.0 + self.accepted / max(1, self.lengths.total())

    def expected(self) -> float:
        """The same by the formula. A tree's tokens are taken as they were."""
        if self.trees:
            return self.each
        found = sum(n * expected_tokens(self.acceptance, k) for k, n in self.lengths.items())
        return found / max(1, self.lengths.total())

    def predicted(self, plain: Seen) -> float:
        """Speed-up: tokens expected over what the step should take, in plain steps. What a plain
        step takes beside the model's pass, it is to take here as well."""
        step, beside = plain.seconds / plain.steps, (plain.seconds - plain.pass_s) / plain.steps
        return self.expected() * step / ((self.pass_s + self.draft_s) / self.steps + beside)


class Watch:
    """Lengths as another one decides them; what came of them is added up."""

    def __init__(self, inner: Lengths) -> None:
        self._inner = inner
        self.seen: Seen | None = None

    def wanted(self, decoding: Sequence[Running], chunk_tokens: int) -> Sequence[int]:
        return self._inner.wanted(decoding, chunk_tokens)

    @property
    def resting(self) -> bool:
        return self._inner.resting

    def passes_by(self) -> bool:
        return self._inner.passes_by()

    def observe(self, outcome: Outcome) -> None:
        self._inner.observe(outcome)
        if self.seen is not None:
            self.seen.add(outcome)

    def speedups(self) -> tuple[float, float]:
        return self._inner.speedups()


class TimedModel(Model):
    """A model that knows how long its passes took."""

    spent = 0.0
    clock: Clock = staticmethod(time.perf_counter)

    def hidden(self, *args: Any, **kwargs: Any) -> Tensor:
        began = self.clock()
        out = super().hidden(*args, **kwargs)
        self.spent += self.clock() - began
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        began = self.clock()
        out = super().logits(hidden)
        self.spent += self.clock() - began
        return out


@dataclass(frozen=True)
class Ratio:
    """A speed-up, and the interval that holds it with 95% probability."""

    value: float
    low: float
    high: float


class Taken(NamedTuple):
    """One slice of the text."""

    seconds: float
    tokens: int


def speedup(plain: Sequence[Taken], other: Sequence[Taken]) -> Ratio:
    """Of ``other`` over ``plain``, from slices in pairs: tokens in all over seconds in all; the
    interval is that of resampled pairs (Efron, 1979)."""
    draw, pairs = random.Random(0), list(zip(plain, other, strict=True))

    def ratio(chosen: Sequence[tuple[Taken, Taken]]) -> float:
        ours, theirs = (
            Taken(*map(sum, zip(*side, strict=True))) for side in zip(*chosen, strict=True)
        )
        return theirs.tokens / theirs.seconds * ours.seconds / ours.tokens

    found = sorted(ratio(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    low, high = found[RESAMPLES // 40], found[-1 - RESAMPLES // 40]
    return Ratio(ratio(pairs), low, high)
